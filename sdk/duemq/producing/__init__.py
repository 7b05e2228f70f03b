"""Inside of the producers.

    call ──► outbox ──► pump ──► link (one stream a broker) ──► broker
             batches    queue,   requests in flight,
             that grow  sequence resends
             while
             they wait

`batch_encoding` bytes of a batch · `batch` messages that travel together · `outbox` what waits,
bounded · `pumping/` what leaves when, and where to · `broker_link` one broker's stream · `sender`
runs the pump.

`batch_encoding`, `batch`, `outbox` and `pumping/` are pure.  Callers' threads touch the outbox
only, under its lock; everything else belongs to the event loop.
"""
