"""Inside of the producers.

    call ──► outbox ──► pump ──► link (one stream a broker) ──► broker
             batches    queue,   requests in flight,
             that grow  sequence resends
             while
             they wait

`encoding` bytes of a batch · `batch` messages that travel together · `outbox` what waits, bounded
· `lane` sequence numbers and what a refusal does to them · `health` brokers to avoid ·
`link` one broker's stream · `sender` the pump that brings them together.

`encoding`, `outbox`, `lane` and `health` are pure.  Callers' threads touch the outbox
only, under its lock; everything else belongs to the event loop.
"""
