"""`duemq.testing` does what a cluster does: the same scenarios against both."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Literal, Protocol

import pytest

from duemq import (
    Admin,
    BatchFailed,
    ConsumerSettings,
    DeadLetter,
    FireOutcome,
    Message,
    Outgoing,
    Producer,
    PushConsumer,
    Receipt,
    RetryLater,
)
from duemq.descriptions import TimerCount, TimerState
from duemq.errors import (
    DuemqError,
    InvalidArgument,
    ScheduleNotFound,
    TimerExists,
    TooLarge,
    TopicExists,
    TopicNotFound,
)
from duemq.protocol.limits import MESSAGE_BYTES_DEFAULT
from duemq.testing import MemoryCluster
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import until

SETTINGS = ConsumerSettings(
    start_from="earliest", commit_interval_s=0.1, suspend_s=0.1, retries_in_order_max=2
)
STEP = "50ms"
STEPS_MAX = 2_000
QUIET = "400ms"
# 02:30 in Berlin, 2031-03-29 and 31; when they are to be, and are due.
FIXED = [(1_932_514_200_000, 1_932_514_204_856), (1_932_683_400_000, 1_932_683_696_278)]


class World(Protocol):
    """What a scenario is played in."""

    producer: Producer

    def consumer(
        self, group: str, topics: Any, callback: Callable[[Any], Any], **options: Any
    ) -> AbstractContextManager[PushConsumer]: ...

    def create_topic(self, name: str, queues: int) -> None: ...

    def delete_topic(self, name: str) -> None: ...

    def put_group(self, name: str, **policy: Any) -> None: ...

    def until(self, condition: Callable[[], bool]) -> None: ...

    def settle(self) -> None:
        """Time passes in which what must not come would come."""

    def dead_letters(self, group: str) -> list[bytes]: ...


class Twin:
    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.producer = self.cluster.producer()
        self.put_group = self.cluster.put_group
        self.looks = self.cluster

    def consumer(
        self, group: str, topics: Any, callback: Callable[[Any], Any], **options: Any
    ) -> AbstractContextManager[PushConsumer]:
        options.setdefault("settings", SETTINGS)
        return self.cluster.push_consumer(group, topics, callback, **options)

    def create_topic(self, name: str, queues: int) -> None:
        self.cluster.create_topic(name, queues=queues)

    def delete_topic(self, name: str) -> None:
        self.cluster.delete_topic(name)

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(STEPS_MAX):
            self.cluster.advance(STEP)
            if condition():
                return
        raise AssertionError("not fulfilled")

    def settle(self) -> None:
        self.cluster.advance(QUIET)

    def dead_letters(self, group: str) -> list[bytes]:
        return [letter.body for letter in self.cluster.dead_letters(group)]


class Real:
    def __init__(self, cluster: EmbeddedCluster, stack: ExitStack) -> None:
        self.nameserver = cluster.nameserver
        self.producer = stack.enter_context(Producer(self.nameserver))
        self.admin = self.looks = stack.enter_context(Admin(self.nameserver))

    def consumer(
        self, group: str, topics: Any, callback: Callable[[Any], Any], **options: Any
    ) -> AbstractContextManager[PushConsumer]:
        options.setdefault("settings", SETTINGS)
        return PushConsumer(group, topics, callback, nameserver=self.nameserver, **options)

    def create_topic(self, name: str, queues: int) -> None:
        self.admin.create_topic(name, queues=queues)

    def delete_topic(self, name: str) -> None:
        self.admin.delete_topic(name)

    def put_group(self, name: str, **policy: Any) -> None:
        self.admin.put_group(name, **policy)

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition)

    def settle(self) -> None:
        """A delayed message is a clock that everything here keeps to."""
        topic, came = name("clock"), threading.Event()
        with self.consumer(name("clock"), topic, lambda _: came.set()):
            self.producer.send(topic, b"tick", delay=QUIET)
            assert came.wait(60)

    def dead_letters(self, group: str) -> list[bytes]:
        return [letter.body for letter in self.admin.dead_letters(group)]


@pytest.fixture(params=["memory", "cluster"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "memory":
        yield Twin()
        return
    with ExitStack() as stack:
        yield Real(request.getfixturevalue("one_broker"), stack)


@pytest.fixture(scope="module")
def one_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("contract"), brokers=1) as cluster:
        yield cluster


def name(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(4)}"


def bodies(messages: Sequence[Message]) -> list[bytes]:
    return [message.body for message in messages]


def test_a_message_arrives_as_it_was_sent(world: World) -> None:
    topic, got = name("t"), list[Message]()
    receipt = world.producer.send(
        topic, b"body", key="k", tag="red", ordering_key="o", properties={"a": "b", "c": ""}
    )
    pending = world.producer.submit(topic, bytearray(b"bytes"))
    with world.consumer(name("g"), topic, got.append):
        world.until(lambda: len(got) == 2)
    message, other = sorted(got, key=lambda each: each.body)
    assert (message.topic, message.stored_topic, message.body) == (topic, topic, b"body")
    assert (message.key, message.tag, message.ordering_key) == ("k", "red", "o")
    assert dict(message.properties) == {"a": "b", "c": ""}
    assert (message.deliveries, message.retry, message.due_ms) == (0, None, None)
    assert (message.message_id, message.broker) == (receipt.message_id, receipt.broker)
    assert (message.queue, message.offset) == (receipt.queue, receipt.offset)
    assert message.store_ms == receipt.store_ms
    assert receipt.handle is receipt.due_ms is None
    assert other.message_id == pending.message_id == pending.result(60).message_id


def test_delayed_messages_come_when_due_in_order_and_once(world: World) -> None:
    topic, got = name("t"), list[Message]()
    world.create_topic(topic, 1)  # else those that are fired together, late, are in no order
    receipts = {b"0": world.producer.send(topic, b"0", deliver_at=1)}
    second, first = world.producer.send_many(
        topic, [Outgoing(body=b"2", delay="600ms", key="k"), Outgoing(body=b"1", delay=0.3)]
    )
    receipts |= {b"1": first, b"2": second}
    settings = replace(SETTINGS, threads=1)
    with world.consumer(name("g"), topic, got.append, settings=settings):
        world.until(lambda: len(got) == 3)
        world.settle()
    assert bodies(got) == [b"0", b"1", b"2"]
    for message in got:
        receipt = receipts[message.body]
        assert (receipt.queue, receipt.offset) == (None, None)
        assert message.due_ms == receipt.due_ms
        assert message.message_id == receipt.message_id
        assert message.store_ms >= message.due_ms
        assert (message.topic, message.stored_topic) == (topic, topic)


def test_cancelling(world: World) -> None:
    topic, got = name("t"), list[Message]()
    far = world.producer.send(topic, b"never", delay="1h").handle
    near = world.producer.send(topic, b"soon", delay="100ms").handle
    assert far is not None
    assert near is not None
    with world.consumer(name("g"), topic, got.append):
        assert world.producer.cancel(far) == "cancelled"
        assert world.producer.cancel([far]) == ["cancelled"]
        world.until(lambda: len(got) == 1)
        assert world.producer.cancel([near, far]) == ["fired", "cancelled"]
    assert bodies(got) == [b"soon"]


def test_timers_under_keys(world: World) -> None:
    topic, received = name("topic"), list[bytes]()
    producer = world.producer

    def send(body: bytes, key: str, delay: str, **options: bool) -> Receipt:
        return producer.send(topic, body, timer_key=key, delay=delay, **options)

    with world.consumer(name("group"), topic, lambda message: received.append(message.body)):
        first = send(b"first", "a", "1h")
        assert first.replaced is None
        second = send(b"second", "a", "1h")
        assert second.replaced == first.handle
        with pytest.raises(TimerExists) as raised:
            send(b"third", "a", STEP, if_absent=True)
        assert (raised.value.handle, raised.value.due_ms) == (second.handle, second.due_ms)
        assert producer.cancel(first) == "cancelled"
        moved = producer.reschedule(key=(topic, "a"), delay=STEP)
        assert moved.outcome == "rescheduled"
        assert moved.handle not in (first.handle, second.handle)
        world.until(lambda: received == [b"second"])
        assert producer.reschedule(key=(topic, "a"), delay=STEP).outcome == "fired"
        assert producer.cancel(key=(topic, "a")) == "fired"
        assert send(b"fourth", "a", "1h", if_absent=True).replaced is None
        send(b"fifth", "b", "1h")
        keys = [(topic, key) for key in ("a", "b", "none")]
        assert producer.cancel(key=keys) == ["cancelled", "cancelled", "unknown"]
        assert producer.cancel(key=keys) == ["cancelled", "cancelled", "unknown"]
        assert producer.reschedule(key=(topic, "a"), delay=STEP).outcome == "unknown"
        world.settle()
        assert received == [b"second"]


def test_looks_at_what_waits(world: World) -> None:
    topic, producer, got = name("topic"), world.producer, list[Message]()
    with world.consumer(name("group"), topic, got.append):
        soon = producer.send(topic, b"soon", delay=STEP)
        gone = producer.send(topic, b"gone", delay="1h")
        producer.send(topic, b"old", timer_key="a/1", delay="2h")
        last = producer.send(topic, b"new", timer_key="a/1", delay="3h", key="k", tag="t")
        first = producer.send(topic, b"other", delay="1h", properties={"p": "v"})
        assert producer.cancel(gone) == "cancelled"
        world.until(lambda: bodies(got) == [b"soon"])

    def all_is_known() -> bool:
        """The broker took them in; the timer service hears of each a moment later."""
        [count] = world.looks.count_timers(topic)
        return (count.accepted, count.fired) == (5, 1)

    world.until(all_is_known)
    assert world.looks.count_timers(topic) == [
        TimerCount(topic, pending=2, accepted=5, fired=1, cancelled=1, replaced=1)
    ]
    handles = [each.handle or "" for each in (soon, gone, last, first)]
    states = [TimerState.FIRED, TimerState.CANCELLED, TimerState.PENDING, TimerState.PENDING]
    found = world.looks.get_timers(handles)
    assert [each.state for each in found] == states
    assert [each.handle for each in found] == handles
    assert (found[0].topic, found[0].body) == (None, None)
    assert (found[2].timer_key, found[2].key, found[2].tag) == ("a/1", "k", "t")
    assert (found[3].body, found[3].properties, found[3].timer_key) == (b"other", {"p": "v"}, None)
    assert [each.handle for each in world.looks.list_timers(topic)] == [first.handle, last.handle]
    [keyed] = world.looks.list_timers(topic, key_prefix="a/")
    assert (keyed.handle, keyed.body) == (last.handle, None)
    assert last.due_ms is not None
    [early] = world.looks.list_timers(topic, until=last.due_ms, bodies=True)
    assert (early.handle, early.body) == (first.handle, b"other")
    [late] = world.looks.list_timers(topic, since=last.due_ms, limit=1)
    assert late.handle == last.handle
    assert world.looks.count_timers(name("none"))[0].accepted == 0
    with pytest.raises(InvalidArgument):
        world.looks.get_timers(["dmq1no"])
    with pytest.raises(InvalidArgument):
        list(world.looks.list_timers(topic, limit=0))


def test_many_that_wait_are_cancelled_and_shifted(world: World) -> None:
    topic, producer = name("topic"), world.producer
    kept = producer.send(topic, b"b", timer_key="b/1", delay="3h")
    for number in range(3):
        producer.send(topic, b"a", timer_key=f"a/{number}", delay="1h")
    world.until(lambda: world.looks.count_timers(topic)[0].accepted == 4)
    assert world.looks.shift_pending(topic, "-30m", key_prefix="a/", dry_run=True) == 3
    assert world.looks.shift_pending(topic, "90m", key_prefix="a/") == 3
    assert kept.due_ms is not None
    assert world.looks.cancel_pending(topic, until=kept.due_ms - 45 * 60_000) == 0
    assert world.looks.cancel_pending(topic, until=kept.due_ms, dry_run=True) == 3
    assert world.looks.cancel_pending(topic, until=kept.due_ms) == 3
    [left] = world.looks.list_timers(topic)
    assert left.handle == kept.handle
    [count] = world.looks.count_timers(topic)
    assert (count.pending, count.cancelled, count.replaced) == (1, 3, 3)
    got = list[Message]()
    with world.consumer(name("group"), topic, got.append):
        assert world.looks.shift_pending(topic, "-5h") == 1
        world.until(lambda: bodies(got) == [b"b"])


def test_those_without_keys_go_to_another_topic(world: World) -> None:
    topic, other, producer = name("topic"), name("other"), world.producer
    world.create_topic(other, 1)
    producer.send(topic, b"stays", timer_key="k", delay="1h")
    gone = producer.send(topic, b"goes", delay="1h")
    world.until(lambda: world.looks.count_timers(topic)[0].accepted == 2)
    assert world.looks.move_pending(topic, other, dry_run=True) == 1
    assert world.looks.move_pending(topic, other) == 1
    [moved] = world.looks.list_timers(other, bodies=True)
    assert (moved.body, moved.due_ms) == (b"goes", gone.due_ms)
    assert moved.handle != gone.handle
    [left] = world.looks.list_timers(topic)
    assert left.timer_key == "k"
    [before], [after] = world.looks.count_timers(topic), world.looks.count_timers(other)
    assert (before.pending, before.replaced) == (1, 1)
    assert (after.accepted, after.pending) == (1, 1)
    for wrong in (topic, "%RETRY%g"):
        with pytest.raises(InvalidArgument):
            world.looks.move_pending(topic, wrong)
    with pytest.raises(TopicNotFound):
        world.looks.move_pending(topic, name("nowhere"))


def test_messages_repeat(world: World) -> None:
    topic, beat, got = name("topic"), name("beat"), list[Message]()
    world.create_topic(topic, 2)
    with world.consumer(name("group"), topic, got.append):
        given = {"topic": topic, "body": b"beat", "key": "k", "properties": {"a": "b"}}
        # Also the first one of two, where the machine stands still for a second.
        plan: dict[str, Any] = {"every": "1s", "count": 2, "catch_up": "all"}
        outcome, made = world.looks.put_schedule(beat, **plan, **given)
        assert (outcome, made.stored, made.ended) == ("created", 1, False)
        assert made.start_ms == made.next_due_ms
        world.until(lambda: len(got) == 2)
    for each, message in enumerate(sorted(got, key=lambda message: message.due_ms or 0)):
        at_ms = (made.start_ms or 0) + 1000 * each
        assert (message.body, message.key, message.due_ms) == (b"beat", "k", at_ms)
        assert message.properties == {
            "a": "b",
            "duemq.schedule": beat,
            "duemq.scheduled_ms": str(at_ms),
        }
        # The id is a hash of the name, and the occurrence: the same wherever it is made.
        digest = hashlib.blake2b(beat.encode(), digest_size=8).hexdigest()
        assert message.message_id == f"schedule-{digest}-{at_ms}"
        assert (message.store_ms >= at_ms, message.born_ms) == (True, at_ms)
    hourly, slow = name("hourly"), {**given, "every": "1h"}  # at the same occurrence, both times
    _, put = world.looks.put_schedule(hourly, **slow)
    assert world.looks.put_schedule(hourly, **slow) == ("unchanged", put)
    assert world.looks.delete_schedule(hourly) is True
    world.until(lambda: world.looks.schedule(beat).ended)
    assert world.looks.next_occurrences(beat) == []
    assert world.looks.delete_schedule(beat) is True
    assert world.looks.delete_schedule(beat) is False


@pytest.fixture
def fixed(world: World) -> Iterator[str]:
    """The topic of a schedule whose messages are the same everywhere: its name has the jitter."""
    topic = name("topic")
    world.create_topic(topic, 2)
    world.looks.put_schedule(
        "fixed",
        topic=topic,
        cron="30 2 * * *",
        zone="Europe/Berlin",
        dst="skip",
        jitter="5m",
        start="2031-03-29T00:00:00Z",
        until="2031-04-01T00:00:00Z",
        catch_up="none",
    )
    yield topic
    world.looks.delete_schedule("fixed")


def test_when_schedules_are_due(world: World, fixed: str) -> None:
    found = [(each.at_ms, each.due_ms) for each in world.looks.next_occurrences("fixed")]
    assert found == FIXED  # on the 30th there is no 02:30
    [(at_ms, due_ms), _] = found
    [waiting] = world.looks.list_timers(fixed)
    assert waiting.due_ms == due_ms
    assert waiting.message_id.endswith(f"-{at_ms}")
    [bucket] = world.looks.timer_histogram(fixed)
    assert bucket.from_ms <= due_ms < bucket.to_ms
    assert (bucket.to_ms - bucket.from_ms, bucket.pending) == (24 * 3_600_000, 1)


def test_a_schedule_is_paused_resumed_and_changed(world: World, fixed: str) -> None:
    looks, second_ms = world.looks, FIXED[1][1]
    [waiting] = looks.list_timers(fixed)
    assert world.producer.cancel(waiting.handle) == "cancelled"
    world.until(lambda: looks.schedule("fixed").next_due_ms == second_ms)
    assert looks.pause_schedule("fixed").next_due_ms is None
    assert (looks.schedule("fixed").stored, list(looks.list_timers(fixed))) == (1, [])
    resumed = looks.resume_schedule("fixed", catch_up="all")
    assert (resumed.paused, resumed.stored, resumed.next_due_ms) == (False, 2, second_ms)
    assert [each for each in looks.schedules() if each.topic == fixed] == [resumed]
    other = {"topic": fixed, "every": "1h"}
    assert looks.put_schedule("fixed", **other, if_absent=True) == ("exists", resumed)
    assert looks.put_schedule("fixed", **other)[0] == "changed"
    assert looks.schedule("fixed").stored == 1
    [count] = looks.count_timers(fixed)
    assert (count.accepted, count.pending, count.cancelled, count.replaced) == (4, 1, 2, 1)


@pytest.mark.parametrize(
    ("given", "kind", "field"),
    [
        ({"every": "999ms"}, InvalidArgument, "every_ms"),
        ({"every": "1s", "until": 1}, InvalidArgument, "until_ms"),
        ({"every": "1s", "zone": "UTC"}, InvalidArgument, "zone"),
        ({"cron": "0 25 * * *"}, InvalidArgument, "cron"),
        ({"cron": "0 0 30 2 *"}, InvalidArgument, "cron"),
        ({"cron": "@daily", "zone": "Mars/Olympus"}, InvalidArgument, "zone"),
        ({"every": "1s", "topic": "none-of-ours"}, TopicNotFound, "topic"),
        ({"every": "1s", "body": bytes(MESSAGE_BYTES_DEFAULT + 1)}, TooLarge, "record.body"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_schedules_that_are_refused(
    world: World, given: dict[str, Any], kind: type[DuemqError], field: str
) -> None:
    topic = name("topic")
    world.create_topic(topic, 1)
    with pytest.raises(kind) as raised:
        world.looks.put_schedule("none", **{"topic": topic, **given})
    assert raised.value.field == field
    assert str(raised.value).startswith(f"{field}: ") or kind is TopicNotFound
    with pytest.raises(ScheduleNotFound, match="there is no schedule 'none'"):
        world.looks.schedule("none")


def test_what_fails_comes_again_and_ends_as_a_dead_letter(world: World) -> None:
    topic, group, got = name("t"), name("g"), list[Message]()
    world.put_group(group, retries_max=2, retry_delays="200ms 300ms")
    receipt = world.producer.send(topic, b"bad", key="k", properties={"a": "b"})
    world.producer.send(topic, b"good")

    def fail(message: Message) -> None:
        got.append(message)
        if message.body == b"bad":
            raise ValueError(f"attempt {message.deliveries}")

    with world.consumer(group, topic, fail):
        world.until(lambda: len(world.dead_letters(group)) == 1)
    tries = [message for message in got if message.body == b"bad"]
    assert len(got) == len(tries) + 1
    assert [message.deliveries for message in tries] == [0, 1, 2]
    assert {message.topic for message in tries} == {topic}
    assert [message.stored_topic for message in tries] == [topic, *[f"%RETRY%{group}"] * 2]
    assert {message.message_id for message in tries} == {receipt.message_id}
    assert {message.key for message in tries} == {"k"}
    assert [dict(message.properties) for message in tries] == [{"a": "b"}] * 3
    _, second, third = tries
    assert second.retry is not None
    assert third.retry is not None
    assert second.retry[:4] == third.retry[:4]
    assert second.retry[:4] == (topic, receipt.broker, receipt.queue, receipt.offset)
    assert [m.retry.error for m in (second, third) if m.retry] == [
        "ValueError: attempt 0",
        "ValueError: attempt 1",
    ]
    assert second.retry.first_failed_ms == third.retry.first_failed_ms
    assert second.due_ms == second.retry.last_failed_ms + 200
    assert third.due_ms == third.retry.last_failed_ms + 300
    assert world.dead_letters(group) == [b"bad"]


def test_a_callback_chooses(world: World) -> None:
    topic, group, got = name("t"), name("g"), list[Message]()
    world.put_group(group, retries_max=5, retry_delays="1h")
    world.producer.send_many(topic, [b"later", b"dead"])

    def choose(message: Message) -> None:
        got.append(message)
        if message.body == b"dead":
            raise DeadLetter("spoilt")
        if message.deliveries < 2:
            raise RetryLater(0 if message.deliveries else "100ms", "busy")

    with world.consumer(group, topic, choose):
        world.until(lambda: len(got) == 4)
        world.settle()
    assert sorted(bodies(got)) == [b"dead", b"later", b"later", b"later"]
    assert world.dead_letters(group) == [b"dead"]
    [last] = [message for message in got if message.deliveries == 2]
    assert last.retry is not None
    assert last.retry.error == "busy"


def test_tags(world: World) -> None:
    topic, got = name("t"), list[Message]()
    for tag in ("a", "b", "c", None):
        world.producer.send(topic, str(tag).encode(), tag=tag)
    with world.consumer(name("g"), {topic: "a || c"}, got.append):
        world.until(lambda: len(got) == 2)
        world.settle()
    assert sorted(bodies(got)) == [b"a", b"c"]


def test_order_by_key_suspends_only_the_key_that_fails(world: World) -> None:
    topic, group, got = name("t"), name("g"), list[tuple[bytes, int]]()
    world.create_topic(topic, queues=1)
    for number in range(3):
        for key in ("bad", "good"):
            world.producer.send(topic, f"{key}{number}".encode(), ordering_key=key)
    world.producer.send(topic, b"free")

    def note(message: Message) -> None:
        got.append((message.body, message.deliveries))
        if message.body == b"bad0" and message.deliveries < 1:
            raise RetryLater("3s")  # long enough for the others, on a busy machine too
        if message.body == b"bad1":
            raise ValueError

    with world.consumer(group, topic, note, order="key"):
        world.until(lambda: (b"bad2", 0) in got)
    of = {
        key: [each for each in got if each[0].startswith(key)] for key in (b"bad", b"good", b"free")
    }
    tries = [(b"bad0", 0), (b"bad0", 1), (b"bad1", 0), (b"bad1", 1), (b"bad1", 2), (b"bad2", 0)]
    assert of[b"bad"] == tries
    assert of[b"good"] == [(b"good0", 0), (b"good1", 0), (b"good2", 0)]
    assert of[b"free"] == [(b"free", 0)]
    assert got.index((b"good2", 0)) < got.index((b"bad0", 1))
    world.until(lambda: world.dead_letters(group) == [b"bad1"])


def test_order_by_queue_suspends_the_queue(world: World) -> None:
    topic, got = name("t"), list[tuple[bytes, int]]()
    world.create_topic(topic, queues=1)
    world.producer.send_many(topic, [b"0", b"1", b"2"])

    def note(message: Message) -> None:
        got.append((message.body, message.deliveries))
        if message.body == b"1" and message.deliveries == 0:
            raise RetryLater("300ms")

    with world.consumer(name("g"), topic, note, order="queue"):
        world.until(lambda: len(got) == 4)
    assert got == [(b"0", 0), (b"1", 0), (b"1", 1), (b"2", 0)]


def test_broadcast_gives_everything_to_everyone(world: World, tmp_path: Any) -> None:
    topic, group = name("t"), name("g")
    got: dict[str, list[tuple[bytes, int]]] = defaultdict(list)
    settings = ConsumerSettings(
        start_from="earliest", suspend_s=0.1, retries_in_order_max=1, offsets_dir=str(tmp_path)
    )
    world.producer.send_many(topic, [b"0", b"bad"])

    def note(member: str) -> Callable[[Message], None]:
        def noted(message: Message) -> None:
            got[member].append((message.body, message.deliveries))
            if message.body == b"bad":
                raise ValueError

        return noted

    def consumer(member: str) -> AbstractContextManager[PushConsumer]:
        return world.consumer(
            group, topic, note(member), broadcast=True, member_name=member, settings=settings
        )

    with consumer("m1"), consumer("m2"):
        world.until(lambda: len(got["m1"]) == len(got["m2"]) == 3)
        world.settle()
    for member in ("m1", "m2"):
        assert sorted(got[member]) == [(b"0", 0), (b"bad", 0), (b"bad", 1)]
    world.producer.send(topic, b"new")
    with consumer("m1"):
        world.until(lambda: len(got["m1"]) == 4)
        world.settle()
    assert got["m1"][3:] == [(b"new", 0)]


def test_members_share_and_the_group_goes_on_where_it_was(world: World) -> None:
    topic, group = name("t"), name("g")
    got: dict[str, list[bytes]] = {"one": [], "two": [], "three": []}
    world.create_topic(topic, queues=4)

    def into(member: str) -> Callable[[Message], None]:
        return lambda message: got[member].append(message.body)

    with (
        world.consumer(group, topic, into("one")) as one,
        world.consumer(group, topic, into("two")) as two,
    ):
        world.until(lambda: len(one.queues) == len(two.queues) == 2)
        for number in range(8):
            world.producer.send(topic, b"%d" % number, ordering_key=f"k{number}")
        world.until(lambda: len(got["one"]) + len(got["two"]) == 8)
    assert sorted(got["one"] + got["two"]) == [b"%d" % number for number in range(8)]
    assert got["one"]
    assert got["two"]
    world.producer.send(topic, b"8")
    with world.consumer(group, topic, into("three")):
        world.until(lambda: bool(got["three"]))
        world.settle()
    assert got["three"] == [b"8"]


def test_where_a_new_group_begins(world: World) -> None:
    topic = name("t")
    old = world.producer.send(topic, b"old")
    world.settle()
    new = world.producer.send(topic, b"new")
    got: dict[Any, list[bytes]] = {}
    with ExitStack() as stack:
        for start in ("earliest", "latest", old.store_ms + 1):
            got[start] = []
            note = lambda message, to=got[start]: to.append(message.body)  # noqa: E731
            stack.enter_context(world.consumer(name("g"), topic, note, start_from=start))
        world.producer.send(topic, b"newest")
        world.until(lambda: all(b"newest" in each for each in got.values()))
    assert new.store_ms > old.store_ms
    assert sorted(got["earliest"]) == [b"new", b"newest", b"old"]
    assert got["latest"] == [b"newest"]
    assert sorted(got[old.store_ms + 1]) == [b"new", b"newest"]


@pytest.mark.parametrize("start_from", ["earliest", "latest"])
@pytest.mark.parametrize("anew", [4, 40])
def test_a_topic_that_is_made_anew_is_another_one(
    world: World, anew: int, start_from: Literal["earliest", "latest"]
) -> None:
    """With fewer messages than were consumed of the old one, and with more."""
    topic, group = name("t"), name("g")
    world.create_topic(topic, queues=1)
    received: list[bytes] = []
    settings = ConsumerSettings(start_from=start_from, commit_interval_s=0.05)
    with world.consumer(group, topic, lambda m: received.append(m.body), settings=settings) as it:
        world.until(lambda: any(queue.topic == topic for queue in it.queues))
        old = [b"old %d" % number for number in range(20)]
        world.producer.send_many(topic, old)
        world.until(lambda: len(received) == len(old))
        world.delete_topic(topic)
        world.create_topic(topic, queues=1)
        new = [b"new %d" % number for number in range(anew)]
        world.producer.send_many(topic, new)
        world.until(lambda: len(received) >= len(old) + len(new))
        world.settle()
    assert sorted(received) == sorted(old + new)
    with world.consumer(group, topic, lambda m: received.append(m.body), settings=settings):
        world.settle()
    assert len(received) == len(old) + len(new)


def test_a_topic_is_made_once(world: World) -> None:
    topic = name("t")
    world.producer.send(topic, b"makes it")
    with pytest.raises(TopicExists) as refused:
        world.create_topic(topic, queues=1)
    assert (refused.value.field, refused.value.value) == ("name", topic)


EARLY, LATE = "2030-01-01T00:00:00Z", "2031-01-01T00:00:00Z"
WRONG: dict[str, tuple[str, Callable[[World, str], object]]] = {
    "until before since": (
        "until",
        lambda world, topic: world.looks.cancel_pending(topic, since=LATE, until=EARLY),
    ),
    "prefix of a change": (
        "key_prefix",
        lambda world, topic: world.looks.cancel_pending(topic, key_prefix="\n"),
    ),
    "prefix of a list": (
        "key_prefix",
        lambda world, topic: list(world.looks.list_timers(topic, key_prefix="\n")),
    ),
    "topic of a count": ("topic", lambda world, topic: world.looks.count_timers(5)),
    "topic of a consumer": (
        "topic",
        lambda world, topic: world.consumer(name("g"), "bad topic", print).__enter__(),
    ),
    "topic that is gone": ("name", lambda world, topic: world.delete_topic(name("gone"))),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_by_the_same_name(world: World, what: str) -> None:
    field, call = WRONG[what]
    topic = name("t")
    world.producer.send(topic, b"x", delay="1h")
    with pytest.raises((InvalidArgument, TopicNotFound)) as refused:
        call(world, topic)
    assert refused.value.field == field


def test_what_is_due_waits_for_a_topic_that_was_deleted(world: World) -> None:
    topic, got = name("t"), list[Message]()
    world.create_topic(topic, queues=1)
    for body in (b"1", b"2"):
        world.producer.send(topic, body, delay="1h")
    world.until(lambda: world.looks.count_timers(topic)[0].accepted == 2)
    world.delete_topic(topic)
    # Due from now on, however long the deletion took.
    assert world.looks.shift_pending(topic, "-1h") == 2
    world.settle()
    [count] = world.looks.count_timers(topic)
    assert (count.pending, count.fired) == (2, 0)
    assert [each.state for each in world.looks.list_timers(topic)] == [TimerState.PENDING] * 2
    world.create_topic(topic, queues=1)
    with world.consumer(name("g"), topic, got.append):
        world.until(lambda: len(got) == 2)
    assert sorted(bodies(got)) == [b"1", b"2"]
    assert list(world.looks.list_timers(topic)) == []


def test_what_was_due_already_keeps_its_time_when_it_is_fired(world: World) -> None:
    topic, got = name("t"), list[Message]()
    world.create_topic(topic, queues=1)
    world.looks.hold_timers(topic)
    receipt = world.producer.send(topic, b"", delay="100ms")
    world.settle()
    assert world.producer.fire(receipt) == FireOutcome.FIRED
    world.looks.resume_timers(topic)
    with world.consumer(name("g"), topic, got.append):
        world.until(lambda: len(got) == 1)
    assert got[0].due_ms == receipt.due_ms


def test_batches(world: World) -> None:
    topic, group = name("t"), name("g")
    world.create_topic(topic, queues=1)
    world.put_group(group, retries_max=3, retry_delays="100ms")
    world.producer.send_many(topic, [b"0", b"bad", b"2"])
    got: list[list[Message]] = []

    def note(messages: list[Message]) -> None:
        got.append(messages)
        bad = [m for m in messages if m.body == b"bad" and m.deliveries == 0]
        if bad:
            raise BatchFailed({bad[0]: ValueError("only this")})

    with world.consumer(group, topic, note, batch=True):
        world.until(lambda: sum(map(len, got)) == 4)
        world.settle()
    flat = [(message.body, message.deliveries) for messages in got for message in messages]
    assert flat == [(b"0", 0), (b"bad", 0), (b"2", 0), (b"bad", 1)]


@pytest.mark.parametrize("order", ["queue", None])
def test_what_failed_of_a_list_comes_again_in_place(
    world: World, tmp_path: Any, order: Literal["queue"] | None
) -> None:
    topic = name("t")
    world.create_topic(topic, queues=1)
    world.producer.send_many(topic, [b"0", b"1", b"2"])
    got: list[list[tuple[bytes, int]]] = []

    def note(messages: list[Message]) -> None:
        got.append([(message.body, message.deliveries) for message in messages])
        if len(got) == 1:
            raise ValueError("all of it")
        if len(got) == 2:
            raise BatchFailed({messages[1]: ValueError("only this")})

    settings = replace(SETTINGS, offsets_dir=str(tmp_path))
    place: dict[str, Any] = {"order": order, "broadcast": order is None, "member_name": "m"}
    with world.consumer(name("g"), topic, note, batch=True, settings=settings, **place):
        world.until(lambda: sum(map(len, got)) == (8 if order else 7))
        world.settle()
    assert got[:3] == [
        [(b"0", 0), (b"1", 0), (b"2", 0)],
        [(b"0", 1), (b"1", 1), (b"2", 1)],
        [(b"1", 2)],
    ]
    assert got[3:] == ([[(b"2", 1)]] if order else [])


REFUSED: dict[str, Callable[[World, str], Any]] = {
    "text": lambda world, topic: world.producer.send(topic, "text"),  # type: ignore[arg-type]
    "large": lambda world, topic: world.producer.send(topic, bytes((4 << 20) + 1)),
    "number as key": lambda world, topic: world.producer.send(topic, b"", key=7),  # type: ignore[arg-type]
    "two due times": lambda world, topic: world.producer.send(topic, b"", delay=1, deliver_at=1),
    "negative delay": lambda world, topic: world.producer.send(topic, b"", delay=-1),
    "far delay": lambda world, topic: world.producer.send(topic, b"", delay="2930000d"),
    "far reschedule": lambda world, topic: world.producer.reschedule(
        world.producer.send(topic, b"", delay="1h"), delay="2930000d"
    ),
    "unknown level": lambda world, topic: world.producer.send(topic, b"", delay_level=19),
    "properties": lambda world, topic: world.producer.send(
        topic, b"", properties={"a": "b" * 40_000}
    ),
    "topic": lambda world, topic: world.producer.send("no spaces", b""),
    "system topic": lambda world, topic: world.producer.send("%x", b""),
    "timers' topic": lambda world, topic: world.producer.send("%TIMER%", b""),
    "timers' topic, later": lambda world, topic: world.producer.send("%TIMER%", b"", delay=1),
    "one message": lambda world, topic: world.producer.send_many(topic, b"bytes"),  # type: ignore[arg-type]
    "handle": lambda world, topic: world.producer.cancel("dmq1nonsense"),
    "filter": lambda world, topic: world.consumer(name("g"), {topic: "a ||"}, print),
    "order": lambda world, topic: world.consumer(name("g"), topic, print, order="reverse"),
    "start": lambda world, topic: world.consumer(name("g"), topic, print, start_from="now"),
    "no topics": lambda world, topic: world.consumer(name("g"), [], print),
    "system topic received": lambda world, topic: enter(world.consumer(name("g"), "%x", print)),
    "group": lambda world, topic: enter(world.consumer("no spaces", topic, print)),
    "timers' group": lambda world, topic: enter(world.consumer("%TIMER%", topic, print)),
    "policy": lambda world, topic: world.put_group(name("g"), retries_max=-1),
    "text as number": lambda world, topic: world.put_group(name("g"), retries_max="1"),
    "delays": lambda world, topic: world.put_group(name("g"), retry_delays="soon"),
    "nowhere": lambda world, topic: world.looks.move_pending(topic, ""),
    "other filter": lambda world, topic: two_members(world, topic),
}


REFUSALS = {
    "text": ("InvalidArgument", "body"),
    "large": ("TooLarge", "body"),
    "number as key": ("InvalidArgument", "key"),
    "two due times": ("InvalidArgument", "delay"),
    "negative delay": ("InvalidArgument", "delay"),
    "far delay": ("InvalidArgument", "delays_ms"),
    "far reschedule": ("InvalidArgument", "delays_ms"),
    "unknown level": ("InvalidArgument", "delay_levels"),
    "properties": ("TooLarge", "properties"),
    "topic": ("InvalidArgument", "topic"),
    "system topic": ("InvalidArgument", "topic"),
    "timers' topic": ("InvalidArgument", "topic"),
    "timers' topic, later": ("InvalidArgument", "topic"),
    "one message": ("InvalidArgument", "messages"),
    "handle": ("InvalidArgument", "handle"),
    "filter": ("InvalidArgument", "filter"),
    "order": ("InvalidArgument", "order"),
    "start": ("InvalidArgument", "start_from"),
    "no topics": ("InvalidArgument", "topics"),
    "system topic received": ("InvalidArgument", "topic"),
    "group": ("InvalidArgument", "group"),
    "timers' group": ("InvalidArgument", "group"),
    "policy": ("InvalidArgument", "retries_max"),
    "text as number": ("InvalidArgument", "retries_max"),
    "delays": ("InvalidArgument", "retry_delays"),
    "nowhere": ("InvalidArgument", "to_topic"),
    "other filter": ("InvalidArgument", "subscriptions"),
}


def enter(consumer: AbstractContextManager[PushConsumer]) -> None:
    with consumer:
        pass


def two_members(world: World, topic: str) -> None:
    group = name("g")
    with world.consumer(group, topic, print):
        enter(world.consumer(group, {topic: "a"}, print))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(world: World, kind: str) -> None:
    topic = name("t")
    world.create_topic(topic, queues=1)
    with pytest.raises(DuemqError) as refused:
        REFUSED[kind](world, topic)
    assert (type(refused.value).__name__, refused.value.field) == REFUSALS[kind]


def test_a_closed_producer(world: World) -> None:
    topic = name("t")
    world.producer.send(topic, b"")
    world.producer.flush()
    world.producer.close()
    world.producer.close()
    for call in (
        lambda: world.producer.send(topic, b""),
        lambda: world.producer.send(name("t"), b""),
        lambda: world.producer.cancel("dmq1"),
        world.producer.flush,
    ):
        with pytest.raises(DuemqError) as refused:
            call()
        assert type(refused.value).__name__ == "Closed"


def test_messages_are_stored_where_they_are_said_to_be(one_broker: EmbeddedCluster) -> None:
    """Ordering keys choose the same queues in the twin as in a cluster of as many queues."""
    topic, twin = name("t"), Twin()
    with ExitStack() as stack:
        real = Real(one_broker, stack)
        for world in (twin, real):
            world.create_topic(topic, queues=4)
        keys = [f"key-{number}" for number in range(20)]
        queues = [
            [world.producer.send(topic, b"", ordering_key=key).queue for key in keys]
            for world in (twin, real)
        ]
        assert queues[0] == queues[1]
