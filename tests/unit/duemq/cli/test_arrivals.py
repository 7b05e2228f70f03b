"""Arrivals tell losses from repeats, also when the totals agree."""

from duemq.cli.bench.arrivals import Arrivals, number_of, numbered


def test_all_once() -> None:
    arrivals = Arrivals(3)
    for number in (2, 0, 1):
        arrivals.add(number)
    assert (arrivals.complete, arrivals.lost, arrivals.twice) == (True, 0, 0)


def test_a_repeat_does_not_hide_a_loss() -> None:
    arrivals = Arrivals(3)
    for number in (0, 1, 1):
        arrivals.add(number)
    assert (arrivals.complete, arrivals.lost, arrivals.twice) == (True, 1, 1)


def test_a_message_never_sent_counts_as_a_repeat() -> None:
    arrivals = Arrivals(1)
    arrivals.add(0)
    arrivals.add(7)
    assert (arrivals.lost, arrivals.twice, arrivals.strange) == (0, 1, 1)


def test_a_body_keeps_its_number() -> None:
    assert number_of(numbered(123_456_789, b"x" * 16)) == 123_456_789
