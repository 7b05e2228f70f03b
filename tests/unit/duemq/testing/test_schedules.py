"""Messages that repeat in the twin."""

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from duemq import CancelOutcome, Message, Producer
from duemq.descriptions import CatchUp, DstPolicy, Schedule
from duemq.errors import (
    InvalidArgument,
    Overloaded,
    ScheduleNotFound,
    TooLarge,
    TopicNotFound,
)
from duemq.protocol.limits import MESSAGE_BYTES_DEFAULT
from duemq.testing import MemoryCluster
from duemq.testing.aio import MemoryCluster as AioMemoryCluster
from duemq_recurring import in_memory
from tests.unit.recurring import wall_oracle

TOPIC = "reports"
START = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
START_MS = int(START.timestamp()) * 1000
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000


@pytest.fixture
def cluster() -> MemoryCluster:
    made = MemoryCluster(now=START)
    made.create_topic(TOPIC)
    return made


@pytest.fixture
def producer(cluster: MemoryCluster) -> Iterator[Producer]:
    with cluster.producer() as made:
        yield made


def came(cluster: MemoryCluster, name: str = "beat") -> list[int]:
    """When the messages of a schedule were to be, from START on, as they were stored."""
    found = [
        int(message.properties["duemq.scheduled_ms"]) - START_MS
        for message in cluster.messages(TOPIC)
        if message.properties.get("duemq.schedule") == name
    ]
    assert len(set(found)) == len(found)
    return found


def put(cluster: MemoryCluster, name: str = "beat", **given: object) -> Schedule:
    return cluster.put_schedule(name, topic=TOPIC, **{"every": "1m", **given})[1]


@pytest.mark.long
def test_a_year_of_schedules() -> None:
    cluster = MemoryCluster(now=START)
    cluster.create_topic(TOPIC)
    berlin, york = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")
    begin, end = START + timedelta(seconds=30), START + timedelta(days=365)
    expected: dict[str, list[int]] = {
        "hourly": [START_MS + HOUR_MS * each for each in range(1, 365 * 24 + 1)]
    }
    cluster.put_schedule("hourly", topic=TOPIC, every="1h")

    def wall(name: str, zone: ZoneInfo, matches: wall_oracle.Matches, cron: str, dst: str) -> None:
        cluster.put_schedule(name, topic=TOPIC, cron=cron, zone=zone.key, dst=dst, jitter="3m")
        instants = wall_oracle.instants(zone, matches, False, dst, begin, end)
        expected[name] = [int(each.timestamp()) * 1000 for each in instants]

    wall(
        "office",
        york,
        lambda at: at.minute % 20 == 0 and 9 <= at.hour < 17 and at.isoweekday() <= 5,
        "*/20 9-16 * * MON-FRI",
        "once",
    )
    for dst in DstPolicy:
        wall(dst, berlin, lambda at: (at.hour, at.minute) == (2, 30), "30 2 * * *", dst)

    cluster.advance("365d")
    found: dict[str, list[int]] = defaultdict(list)
    late = set()
    for message in cluster.messages(TOPIC):
        name = message.properties["duemq.schedule"]
        at_ms = int(message.properties["duemq.scheduled_ms"])
        found[name].append(at_ms)
        assert message.due_ms is not None
        assert message.store_ms == message.due_ms
        late.add((name == "hourly", message.due_ms - at_ms))
    assert found == expected
    days = {dst: len(expected[dst]) for dst in DstPolicy}
    assert days == {"once": 365, "skip": 364, "twice": 366, "shift": 365}
    assert {ms for hourly, ms in late if hourly} == {0}
    assert len(late) > 1_000
    assert max(ms for _, ms in late) <= 3 * MINUTE_MS


def test_a_message_is_what_was_given(cluster: MemoryCluster) -> None:
    given = {"body": b"go", "key": "k", "tag": "t", "properties": {"a": "b"}}
    outcome, made = cluster.put_schedule("beat", topic=TOPIC, every="1m", **given)
    assert outcome == "created"
    assert (made.topic, made.every_ms, made.stored) == (TOPIC, MINUTE_MS, 1)
    assert made.next_due_ms == START_MS + MINUTE_MS
    assert cluster.schedule("beat") == made
    got = []
    with cluster.push_consumer("g", TOPIC, got.append):
        cluster.advance("1m")
    [message] = got
    assert (message.body, message.key, message.tag) == (b"go", "k", "t")
    assert message.properties == {
        "a": "b",
        "duemq.schedule": "beat",
        "duemq.scheduled_ms": str(START_MS + MINUTE_MS),
    }


def test_the_same_changes_nothing_and_another_begins_now(cluster: MemoryCluster) -> None:
    put(cluster)
    cluster.advance("90s")
    assert cluster.put_schedule("beat", topic=TOPIC, every="1m")[0] == "unchanged"
    refused = cluster.put_schedule("beat", topic=TOPIC, every="1h", if_absent=True)
    assert (refused[0], refused[1].every_ms) == ("exists", MINUTE_MS)
    assert cluster.put_schedule("beat", topic=TOPIC, every="1h")[0] == "changed"
    cluster.advance("1h")
    assert came(cluster) == [MINUTE_MS, 90_000 + HOUR_MS]
    [count] = cluster.count_timers(TOPIC)
    assert (count.accepted, count.pending, count.fired, count.replaced) == (4, 1, 2, 1)


@pytest.mark.parametrize(
    ("catch_up", "missed"),
    [
        (CatchUp.ALL, [2, 3, 4, 5]),
        (CatchUp.LATEST, [5]),
        (CatchUp.NONE, [5]),  # it is late by less than a minute
    ],
)
def test_a_pause_and_what_was_missed(
    cluster: MemoryCluster, catch_up: str, missed: list[int]
) -> None:
    put(cluster, catch_up=catch_up)
    cluster.advance("1m")
    assert cluster.pause_schedule("beat").paused
    assert cluster.pending() == []
    cluster.advance("4m30s")
    assert came(cluster) == [MINUTE_MS]
    assert not cluster.resume_schedule("beat").paused
    assert came(cluster) == [MINUTE_MS * each for each in (1, *missed)]
    cluster.advance("1m")
    assert came(cluster) == [MINUTE_MS * each for each in (1, *missed, 6)]


def test_a_resume_with_a_policy_of_its_own(cluster: MemoryCluster) -> None:
    put(cluster, every="1h", catch_up="all")
    cluster.pause_schedule("beat")
    cluster.advance("3h2m")
    cluster.resume_schedule("beat", catch_up="none")
    cluster.advance("1h")
    assert came(cluster) == [4 * HOUR_MS]


def test_one_of_a_held_topic_waits_unless_all_are_wanted(cluster: MemoryCluster) -> None:
    put(cluster, "latest")
    put(cluster, "all", catch_up="all")
    cluster.hold_timers(TOPIC)
    cluster.advance("10m30s")
    assert cluster.messages(TOPIC) == []
    cluster.resume_timers(TOPIC)
    assert came(cluster, "latest") == [10 * MINUTE_MS]
    assert came(cluster, "all") == [MINUTE_MS * each for each in range(1, 11)]


def test_the_next_one_comes_after_a_cancel(cluster: MemoryCluster, producer: Producer) -> None:
    put(cluster)
    [waiting] = cluster.pending()
    assert producer.cancel(waiting.handle) == CancelOutcome.CANCELLED
    [following] = cluster.pending()
    assert following.due_ms == START_MS + 2 * MINUTE_MS
    cluster.advance("2m")
    assert came(cluster) == [2 * MINUTE_MS]


def test_one_that_is_fired_now_is_not_sent_again(
    cluster: MemoryCluster, producer: Producer
) -> None:
    put(cluster)
    producer.fire(cluster.pending()[0].handle)
    assert came(cluster) == [MINUTE_MS]
    cluster.advance("3m")
    assert came(cluster) == [MINUTE_MS * each for each in (1, 2, 3)]


def test_bounds(cluster: MemoryCluster) -> None:
    put(cluster, count=3)
    put(cluster, "until", start=START_MS + 5_000, until=START_MS + 2 * MINUTE_MS)
    cluster.advance("1h")
    assert came(cluster) == [MINUTE_MS * each for each in (1, 2, 3)]
    assert came(cluster, "until") == [5_000, MINUTE_MS + 5_000]
    assert [each.ended for each in cluster.schedules()] == [True, True]
    assert cluster.next_occurrences("beat") == []


def test_what_comes_next(cluster: MemoryCluster) -> None:
    put(cluster, jitter="30s")
    found = cluster.next_occurrences("beat", 3)
    assert [each.at_ms - START_MS for each in found] == [MINUTE_MS * each for each in (1, 2, 3)]
    cluster.advance("5m")
    dues = [message.due_ms for message in cluster.messages(TOPIC)]
    assert dues[:3] == [each.due_ms for each in found]
    twin = MemoryCluster(now=START)
    twin.create_topic(TOPIC)
    put(twin, jitter="30s")
    assert twin.next_occurrences("beat", 3) == found


def test_names_and_deleting(cluster: MemoryCluster) -> None:
    assert cluster.schedules() == []
    for name in ("b", "a", "c"):
        put(cluster, name)
    assert [each.name for each in cluster.schedules()] == ["a", "b", "c"]
    assert cluster.delete_schedule("b") is True
    assert cluster.delete_schedule("b") is False
    cluster.advance("1m")
    assert [len(came(cluster, name)) for name in "abc"] == [1, 0, 1]


def test_many_are_listed_page_by_page(cluster: MemoryCluster) -> None:
    names = [f"n{number:04}" for number in range(1_001)]
    for name in names:
        put(cluster, name)
    assert [each.name for each in cluster.schedules()] == names


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"cron": "60 * * * *", "every": None}, "cron"),
        ({"cron": "* * * * *", "zone": "Mars/Olympus", "every": None}, "zone"),
        ({"every": "999ms"}, "every_ms"),
        ({"every": None}, "every"),
        ({"until": START_MS}, "until_ms"),
        ({"dst": "never"}, "dst"),
        ({"catch_up": "some"}, "catch_up"),
        ({"count": 0}, "count"),
    ],
)
def test_an_error_names_the_field(
    cluster: MemoryCluster, given: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        put(cluster, **given)
    assert raised.value.field == field
    assert cluster.schedules() == []
    assert cluster.pending() == []


def test_other_errors(cluster: MemoryCluster) -> None:
    with pytest.raises(TopicNotFound):
        cluster.put_schedule("beat", topic="none", every="1m")
    with pytest.raises(TooLarge):
        put(cluster, body=bytes(MESSAGE_BYTES_DEFAULT + 1))
    with pytest.raises(InvalidArgument, match="name"):
        put(cluster, "no spaces")
    for call in (
        cluster.schedule,
        cluster.pause_schedule,
        cluster.resume_schedule,
        cluster.next_occurrences,
    ):
        with pytest.raises(ScheduleNotFound):
            call("beat")
    put(cluster)
    with pytest.raises(InvalidArgument, match="count"):
        cluster.next_occurrences("beat", 1_001)


def test_moments_count_from_the_clock_of_the_twin(cluster: MemoryCluster) -> None:
    assert put(cluster, start="now").start_ms == START_MS
    cluster.advance("1d")
    assert put(cluster, start="-1h").start_ms == START_MS + DAY_MS - HOUR_MS


async def test_an_asyncio_program() -> None:
    cluster = AioMemoryCluster(now=START)
    cluster.create_topic(TOPIC)
    cluster.put_schedule("beat", topic=TOPIC, every="1m")
    got = []

    async def note(message: Message) -> None:
        got.append(message.due_ms)

    async with cluster.push_consumer("g", TOPIC, note):
        await cluster.advance("3m")
    assert got == [START_MS + MINUTE_MS * each for each in (1, 2, 3)]
    assert [each.stored for each in cluster.schedules()] == [4]


def test_without_the_rules_it_says_what_to_install(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duemq_recurring.in_memory", None)
    with pytest.raises(ImportError, match=r"pip install 'duemq\[testing\]'"):
        put(cluster)
    assert cluster.timer_histogram() == []


def test_a_histogram_of_what_waits(cluster: MemoryCluster, producer: Producer) -> None:
    assert cluster.timer_histogram() == []
    for delay in ("10s", "20s", "40s", "23h", "2d", "2d1h", "40d", "400d"):
        producer.send(TOPIC, b"x", delay=delay)
    gone = producer.send(TOPIC, b"x", delay="1h").handle
    assert gone is not None
    producer.cancel(gone)
    producer.send("other", b"x", delay="20s")
    begin_ms = START_MS - 30_000
    expected = [
        (START_MS, begin_ms + MINUTE_MS, 2),
        (begin_ms + MINUTE_MS, begin_ms + 2 * MINUTE_MS, 1),
        (begin_ms + 23 * HOUR_MS, begin_ms + 23 * HOUR_MS + MINUTE_MS, 1),
        (begin_ms + 48 * HOUR_MS, begin_ms + 49 * HOUR_MS, 1),
        (begin_ms + 49 * HOUR_MS, begin_ms + 50 * HOUR_MS, 1),
        (begin_ms + 40 * DAY_MS, begin_ms + 41 * DAY_MS, 1),
        (begin_ms + 400 * DAY_MS, begin_ms + 401 * DAY_MS, 1),
    ]

    def told(topic: str | None = None) -> list[tuple[int, int, int]]:
        found = cluster.timer_histogram(topic)
        assert all(one.to_ms <= other.from_ms for one, other in itertools.pairwise(found))
        return [(each.from_ms, each.to_ms, each.pending) for each in found]

    assert told(TOPIC) == expected
    assert told() == [(*expected[0][:2], 3), *expected[1:]]
    cluster.hold_timers(TOPIC)
    cluster.advance("15s")
    [overdue, first, *_] = told(TOPIC)
    assert overdue == (0, START_MS + 15_000, 1)
    assert first == (START_MS + 15_000, begin_ms + MINUTE_MS, 1)


def test_no_more_are_kept_than_a_shard_keeps(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_memory, "SCHEDULES_MAX", 2)
    put(cluster, "a")
    put(cluster, "b")
    with pytest.raises(Overloaded, match="this shard has 2 schedules") as refused:
        put(cluster, "c")
    assert not refused.value.retryable
    put(cluster, "b", every="2m")  # one that is there may be changed
    monkeypatch.setattr(in_memory, "BYTES_MAX", 2_000)
    with pytest.raises(Overloaded, match="schedule_bytes_max"):
        put(cluster, "a", body=bytes(3_000))


def test_an_end_in_1970_is_not_no_end(cluster: MemoryCluster) -> None:
    with pytest.raises(InvalidArgument) as raised:
        put(cluster, until=0)
    assert raised.value.field == "until_ms"
    assert put(cluster, every="1h", start=0).next_due_ms == START_MS - 30_000 + HOUR_MS + 1


def test_a_period_of_nothing_is_told_as_too_short(cluster: MemoryCluster) -> None:
    with pytest.raises(InvalidArgument, match="every_ms: 0 is not allowed: a whole number"):
        put(cluster, every="0s")
