import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import InvalidArgument
from duemq_recurring.cron import Cron
from duemq_recurring.occurrences import (
    END_MS,
    EVERY_MS_MAX,
    Occurrence,
    Occurrences,
    Recurrence,
)

NOON_MS = int(datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp() * 1000)


def of(recurrence: Recurrence, name: str = "nightly") -> Occurrences:
    recurrence.check()
    return Occurrences(name, recurrence)


def times(occurrences: Occurrences, after_ms: int, count: int) -> list[int]:
    return [each.at_ms for each in itertools.islice(occurrences.following(after_ms), count)]


def test_every_counts_from_its_start() -> None:
    every = of(Recurrence(every_ms=1_500, from_ms=NOON_MS + 7))
    assert times(every, 0, 3) == [NOON_MS + 7, NOON_MS + 1_507, NOON_MS + 3_007]
    assert times(every, NOON_MS + 1_507, 1) == [NOON_MS + 3_007]


def test_from_and_until_are_of_it() -> None:
    spec = Recurrence(cron="0 * * * *", from_ms=NOON_MS, until_ms=NOON_MS + 2 * 3_600_000)
    assert times(of(spec), 0, 9) == [NOON_MS, NOON_MS + 3_600_000, NOON_MS + 7_200_000]


def test_nothing_comes_after_the_end_of_the_calendar() -> None:
    assert of(Recurrence(cron="0 0 1 1 *")).after(END_MS - 3_600_000) is None
    assert of(Recurrence(every_ms=1_000)).after(END_MS) is None


@pytest.mark.parametrize("text", ["0 0 30 2 MON", "0 0 29 2 *", "0 0 31 4 SUN#1"])
def test_expressions_that_hardly_match(text: str) -> None:
    found = times(of(Recurrence(cron=text)), NOON_MS, 3)
    assert len(found) == 3
    assert found == sorted(set(found))


@pytest.mark.parametrize("text", ["0 0 30 2 *", "0 0 31 4,6 *"])
def test_what_never_comes_is_refused_or_ends(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"day-of-month .*not beyond its months"):
        Cron(text)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("60 * * * *", "minute"),
        ("60 * * * * *", "second"),
        ("* 24 * * *", "hour"),
        ("* * 32 * *", "day-of-month"),
        ("* * * FOO *", "month"),
        ("* * * * 8", "day-of-week"),
        ("*/0 * * * *", "minute"),
        ("5-1 * * * *", "minute"),
        ("* * * *", "minute hour day-of-month"),
        ("", "minute hour day-of-month"),
        ("* * * * *; rm", "minute hour day-of-month"),
    ],
)
def test_an_error_names_the_field_of_the_expression(text: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        Cron(text)
    assert field in str(raised.value)
    assert raised.value.field == "cron"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (Recurrence(), "every_ms"),
        (Recurrence(every_ms=1_000, cron="* * * * *"), "every_ms"),
        (Recurrence(every_ms=999), "every_ms"),
        (Recurrence(every_ms=1_000, count=-1), "count"),
        (Recurrence(every_ms=1_000, jitter_ms=-1), "jitter_ms"),
        (Recurrence(every_ms=1_000, from_ms=2, until_ms=1), "until_ms"),
        (Recurrence(every_ms=1_000, until_ms=END_MS + 1), "until_ms"),
    ],
)
def test_an_error_names_the_field_of_the_recurrence(spec: Recurrence, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        spec.check()
    assert raised.value.field == field


@given(
    every_s=st.integers(1, 5_000), jitter_ms=st.integers(0, 10_000_000), name=st.text(max_size=9)
)
def test_jitter_is_never_early_and_never_passes_the_next(
    every_s: int, jitter_ms: int, name: str
) -> None:
    spec = Recurrence(every_ms=1000 * every_s, jitter_ms=jitter_ms, from_ms=NOON_MS)
    found = list(itertools.islice(of(spec, name).following(NOON_MS), 20))
    for one, following in itertools.pairwise(found):
        assert one.at_ms <= one.due_ms <= one.at_ms + jitter_ms
        assert one.due_ms < following.at_ms
    assert found == list(itertools.islice(of(spec, name).following(NOON_MS), 20))


def test_jitter_does_not_pass_the_end_of_the_calendar() -> None:
    """No message may be due then: nobody could list it."""
    last = Recurrence(every_ms=1_000, from_ms=END_MS, jitter_ms=EVERY_MS_MAX)
    assert of(last).after(0) == Occurrence(END_MS, END_MS)


def test_jitter_spreads_names_and_occurrences() -> None:
    spec = Recurrence(every_ms=60_000, jitter_ms=30_000, from_ms=NOON_MS)
    late = {
        each.due_ms - each.at_ms
        for name in map(str, range(20))
        for each in itertools.islice(of(spec, name).following(NOON_MS), 20)
    }
    assert len(late) > 350
    assert min(late) < 1_000
    assert max(late) > 29_000


@pytest.mark.parametrize("text", ["*/5 * * * *", "0 3 * * *", "0 0 29 2 *", "* * * * * *"])
@given(after_s=st.integers(0, 40_000), length_s=st.integers(0, 20_000))
def test_latest_is_the_last_of_a_walk(text: str, after_s: int, length_s: int) -> None:
    occurrences = of(Recurrence(cron=text))
    after_ms = NOON_MS + 1000 * after_s
    now_ms = after_ms + min(1000 * length_s, 400_000 if text.startswith("* *") else 1 << 60)
    walked: Occurrence | None = None
    for each in occurrences.following(after_ms):
        if each.at_ms > now_ms:
            break
        walked = each
    assert occurrences.latest(after_ms, now_ms) == walked


def test_latest_of_a_long_time() -> None:
    years = 10 * 366 * 86_400_000
    found = of(Recurrence(cron="* * * * * *")).latest(NOON_MS, NOON_MS + years)
    assert found is not None
    assert found.at_ms == NOON_MS + years
