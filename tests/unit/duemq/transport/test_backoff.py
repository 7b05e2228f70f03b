from duemq.transport.backoff import Backoff


def test_waits_grow_within_their_bounds_and_begin_anew():
    backoff = Backoff(0.1, 2.0)
    waits = [backoff.next_s() for _ in range(50)]
    assert all(0.1 <= wait <= 2.0 for wait in waits)
    assert waits[0] <= 0.2
    assert backoff.attempts == 50
    backoff.reset()
    assert backoff.attempts == 0
    assert backoff.next_s() <= 0.2


def test_a_long_outage_does_not_overflow():
    backoff = Backoff(0.1, 2.0)
    backoff.attempts = 10_000
    assert backoff.next_s() <= 2.0
