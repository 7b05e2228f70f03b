import numpy as np
import pytest

from duemq_server.timer_service.edge.metrics import lateness_of
from duemq_server.timer_service.scheduling.lateness import BOUNDS_MS, BUCKETS, EXACT_MS, Lateness
from duemq_server.timer_service.scheduling.topic_lateness import SHOWN_MAX, TopicLateness

NOW = 1_700_000_000_000


def test_bounds_grow_by_an_eighth_at_most() -> None:
    assert len(BOUNDS_MS) == BUCKETS
    assert (np.diff(BOUNDS_MS) > 0).all()
    above = BOUNDS_MS[EXACT_MS:].astype(float)
    assert (above[1:] / above[:-1]).max() < 1.13


def test_percentiles_of_nothing_are_zero() -> None:
    assert Lateness().percentiles(NOW, 0.5, 0.99) == [0.0, 0.0]


def record(lateness: Lateness, late_ms: list[int], now_ms: int = NOW) -> None:
    lateness.record(now_ms - np.array(late_ms), now_ms, now_ms)


def test_percentiles_and_maximum_are_of_the_last_minute() -> None:
    lateness = Lateness()
    record(lateness, [50_000], NOW - 70_000)
    record(lateness, list(range(100)), NOW - 30_000)
    record(lateness, [1] * 100)

    p50, p99 = lateness.percentiles(NOW, 0.5, 0.99)

    assert p50 == 1.0
    assert p99 == pytest.approx(98, rel=0.13)
    assert lateness.max_ms(NOW) == 99


@pytest.mark.parametrize("by_ms", [-3_600_000, 3_600_000])
def test_the_last_minute_is_a_minute_though_the_clock_is_set(by_ms: int) -> None:
    """Back: or all that came since would be of one second, until the clock is there again."""
    lateness = Lateness()
    record(lateness, [50_000])
    record(lateness, [300], NOW + by_ms)
    assert lateness.max_ms(NOW + by_ms) == 300
    record(lateness, [1], NOW + by_ms + 120_000)
    assert lateness.max_ms(NOW + by_ms + 120_000) == 1


def test_early_fires_are_counted_by_the_broker_s_clock() -> None:
    lateness = Lateness()
    lateness.record(np.array([NOW, NOW + 1, NOW - 5]), NOW, NOW + 3)

    assert lateness.early == 1


def test_lateness_ends_when_the_broker_says_that_the_message_is_durable() -> None:
    lateness = Lateness()
    lateness.record(np.array([NOW] * 10), NOW + 1, NOW + 6)

    assert lateness.percentiles(NOW + 6, 0.5) == [6.0]


def test_what_was_due_when_it_was_accepted_is_counted_for_itself() -> None:
    lateness = Lateness()
    due_ms = np.array([0, NOW - 2])
    lateness.record(due_ms, NOW, NOW, np.array([True, False]))
    lateness.record(due_ms[:1], NOW, NOW, np.array([True]))

    assert lateness.percentiles(NOW, 0.5, 0.99) == [2.0, 2.0]
    assert lateness.max_ms(NOW) == 2
    assert lateness.past_due == 2


def shown(lateness: TopicLateness) -> dict[str, float]:
    """The shard's histogram: by `le`, and the sum."""
    samples = lateness_of(lateness).samples
    return {
        each.labels.get("le", each.name.removeprefix("duemq_timer_lateness_ms_")): each.value
        for each in samples
    }


def test_the_histogram_has_what_was_answered_just_now() -> None:
    lateness = TopicLateness()
    lateness.record("t", np.array([NOW - 10, NOW - 11, 0]), NOW, np.array([False, False, True]))
    found = shown(lateness)
    assert (found["8"], found["10"], found["16"], found["+Inf"]) == (0, 1, 2, 2)
    assert (found["count"], found["sum"]) == (2, 21)


def test_the_histogram_has_all_topics_and_nothing_of_it_goes_back() -> None:
    lateness = TopicLateness()
    assert (shown(lateness)["count"], shown(lateness)["sum"]) == (0, 0)
    for n in range(SHOWN_MAX + 10):
        lateness.record(f"t{n}", np.array([NOW - 3]), NOW)
        found = shown(lateness)
        assert (found["2"], found["3"], found["count"], found["sum"]) == (
            0,
            n + 1,
            n + 1,
            3 * n + 3,
        )


def test_a_topic_may_fire_for_the_first_time_while_another_thread_counts_them_all() -> None:
    lateness = TopicLateness()

    class Meanwhile:
        """In place of a topic's counts: what another thread does as they are added up."""

        __array_ufunc__ = None

        def __radd__(self, sum_before: object) -> object:
            lateness.record("b", np.array([0]), 1)
            return sum_before

    lateness.record("a", np.array([0]), 1)
    lateness._counts["during"] = Meanwhile()  # type: ignore[assignment]
    assert lateness.total_buckets()[-1] == 1
    del lateness._counts["during"]
    assert lateness.total_buckets()[-1] == 2
