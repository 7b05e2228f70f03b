"""Arrivals tell losses from repeats, also when the totals agree."""

from duemq_server.bench.harness.arrivals import Arrivals, number_of, numbered


def bodies(*numbers: int) -> list[bytes]:
    return [numbered(number, b"x") for number in numbers]


def test_all_once() -> None:
    arrivals = Arrivals(3)
    arrivals.add(bodies(2, 0))
    arrivals.add(bodies(1))
    assert (arrivals.complete, arrivals.lost, arrivals.twice) == (True, 0, 0)


def test_a_repeat_does_not_hide_a_loss() -> None:
    arrivals = Arrivals(3)
    arrivals.add(bodies(0, 1, 1))
    assert (arrivals.complete, arrivals.lost, arrivals.twice) == (True, 1, 1)


def test_a_message_never_sent_counts_as_a_repeat() -> None:
    arrivals = Arrivals(1)
    arrivals.add(bodies(0, 7))
    assert (arrivals.lost, arrivals.twice, arrivals.strange) == (0, 1, 1)


def test_a_body_keeps_its_number() -> None:
    assert number_of(numbered(123_456_789, b"x" * 16)) == 123_456_789
