"""Ordered consumption with real workers, threads and tasks; what feeds it is played here."""

import asyncio
import random
import threading
from collections import Counter, defaultdict
from contextlib import asynccontextmanager

import pytest

from duemq.consumer.delivery import in_place
from duemq.consumer.delivery.in_place import InPlaceDispatcher
from duemq.consumer.delivery.lease import Lease
from duemq.consumer.fetching.fetcher import Source
from duemq.consumer.fetching.subscription import ALL
from duemq.consumer.settings import ConsumerSettings
from duemq.message import Message, Origin
from duemq.outcomes import BatchFailed, DeadLetter, NotTaken, Outcome, RetryLater
from duemq.protocol.balance import MessageQueue
from duemq.v1.message_pb2 import Record
from tests.service.running_cluster import until

QUEUE = MessageQueue("orders", "b0", 0)

either = pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "tasks"])


def source(queue: MessageQueue = QUEUE, start: int = 0) -> Source:
    return Source(queue, ALL, 1, start)


def messages_of(source: Source, *keys: str | None) -> list[Message]:
    origin = Origin(*source.queue)
    start = source.pending.pull_offset
    return [
        Message(Record(ordering_key=key or "", message_id=f"m{start + n}"), origin, start + n, 0)
        for n, key in enumerate(keys)
    ]


class Journal:
    """A callback that notes what runs, and does as it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str | None, int]] = []
        """(offset, key, attempt) of every call as it began."""
        self.running: defaultdict[str | None, int] = defaultdict(int)
        self.most: defaultdict[str | None, int] = defaultdict(int)
        self.fail: dict[int, list[BaseException]] = {}
        """By offset: what the next calls raise."""
        self.gates: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    @property
    def offsets(self) -> list[int]:
        return [offset for offset, _, _ in self.calls]

    def hold(self, offset: int) -> threading.Event:
        """Calls for this offset wait for the answer to be set."""
        self.gates[offset] = threading.Event()
        return self.gates[offset]

    def begin(self, message: Message) -> None:
        key = message.ordering_key
        with self._lock:
            self.calls.append((message.offset, key, message.deliveries))
            self.running[key] += 1
            self.most[key] = max(self.most[key], self.running[key])

    def end(self, message: Message) -> None:
        with self._lock:
            self.running[message.ordering_key] -= 1
            failures = self.fail.get(message.offset)
            error = failures.pop(0) if failures else None
        if error is not None:
            raise error

    def callback(self, asynchronous: bool):
        def receive(message: Message) -> None:
            self.begin(message)
            if gate := self.gates.get(message.offset):
                assert gate.wait(60)
            self.end(message)

        async def receive_async(message: Message) -> None:
            self.begin(message)
            if gate := self.gates.get(message.offset):
                await until(gate.is_set)
            self.end(message)

        return receive_async if asynchronous else receive


class Settler:
    """Takes dead letters, unless told to refuse."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, str, int]] = []
        self.refuse = 0
        self.refused = lambda: None
        self.asked = 0
        self.gate = asyncio.Event()
        """Not set: who asks waits."""
        self.gate.set()

    async def send_back(
        self, source: Source, message: Message, outcome: Outcome, deliveries: int
    ) -> bool:
        assert outcome.dead_letter
        self.asked += 1
        await asyncio.sleep(0)
        await self.gate.wait()
        if self.refuse:
            self.refuse -= 1
            self.refused()
            return False
        self.taken.append((message.offset, outcome.error, deliveries))
        return True


class Consumption:
    """A dispatcher and what stands around it."""

    def __init__(self, order, callback, *, batch: bool = False, lease=None, **settings) -> None:
        self.settler = Settler()
        self.room_to = 0
        """The commit point when the fetcher was told last that there may be room."""
        self.tasks: set[asyncio.Task] = set()
        self.dispatcher = InPlaceDispatcher(
            callback,
            lanes=order or "message",
            batch=batch,
            settings=ConsumerSettings(**{"threads": 4, "suspend_s": 0.001, **settings}),
            settler=self.settler,
            lease=lease or Lease.forever(),
            progressed=self._progressed,
            spawn=self._spawn,
            group="billing",
        )

    def _progressed(self, source: Source) -> None:
        self.room_to = source.pending.commit_point

    def _spawn(self, work) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def give(self, source: Source, *keys: str | None) -> None:
        messages = messages_of(source, *keys)
        self.dispatcher.dispatch(source, messages, messages[-1].offset + 1, 100)


@asynccontextmanager
async def consuming(*arguments, **options):
    made = Consumption(*arguments, **options)
    made.dispatcher.start()
    try:
        yield made
    finally:
        await made.dispatcher.stop(10)


def done(source: Source) -> bool:
    return source.pending.commit_point == source.pending.pull_offset


@either
async def test_a_queue_is_processed_one_by_one(asynchronous: bool) -> None:
    journal, queue = Journal(), source()
    async with consuming("queue", journal.callback(asynchronous)) as consumption:
        for _ in range(3):
            consumption.give(queue, *["a", "b", None] * 200)
        await until(lambda: done(queue))
    assert journal.offsets == list(range(1800))
    assert queue.pending.unfinished == 0


@pytest.mark.parametrize("error", [None, DeadLetter("no")], ids=["done", "given up"])
@either
async def test_the_fetcher_hears_of_the_room_that_there_is(
    asynchronous: bool, error: DeadLetter | None
) -> None:
    """Nothing more would come of a queue whose window was full."""
    journal, queue = Journal(), source()
    journal.fail = {0: [error]} if error else {}
    async with consuming("queue", journal.callback(asynchronous)) as consumption:
        consumption.give(queue, "a")
        await until(lambda: consumption.room_to == 1)


@either
async def test_keys_run_side_by_side_and_each_in_order(asynchronous: bool) -> None:
    journal, queue = Journal(), source()
    first = journal.hold(0)
    async with consuming("key", journal.callback(asynchronous)) as consumption:
        consumption.give(queue, "a", "b", "a", None, "b", "c")
        await until(lambda: {1, 3, 4, 5} <= set(journal.offsets))
        assert 2 not in journal.offsets
        assert queue.pending.commit_point == 0
        first.set()
        await until(lambda: done(queue))
    assert [offset for offset, key, _ in journal.calls if key == "a"] == [0, 2]
    assert [offset for offset, key, _ in journal.calls if key == "b"] == [1, 4]


@either
async def test_queues_run_side_by_side(asynchronous: bool) -> None:
    journal, one, other = Journal(), source(), source(MessageQueue("orders", "b0", 1), 100)
    gate = journal.hold(0)
    async with consuming("queue", journal.callback(asynchronous)) as consumption:
        consumption.give(one, "a")
        consumption.give(other, "a")
        await until(lambda: done(other))
        gate.set()
        await until(lambda: done(one))


@either
@pytest.mark.parametrize("order", ["queue", "key"])
async def test_a_failure_is_tried_again_before_what_waits_behind_it(
    order, asynchronous: bool
) -> None:
    journal, queue = Journal(), source()
    journal.fail = {1: [ValueError("one"), RetryLater(0.002), ValueError("three")]}
    async with consuming(order, journal.callback(asynchronous)) as consumption:
        consumption.give(queue, *["a"] * 4)
        await until(lambda: done(queue))
        assert consumption.settler.taken == []
    assert [(offset, attempt) for offset, _, attempt in journal.calls] == [
        (0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (3, 0),
    ]  # fmt: skip


@either
async def test_a_key_that_fails_does_not_hold_up_the_others(asynchronous: bool) -> None:
    journal, queue = Journal(), source()
    journal.fail = {0: [ValueError("no")] * 1_000_000}
    retries = {"suspend_s": 3_600.0}
    async with consuming("key", journal.callback(asynchronous), **retries) as consumption:
        consumption.give(queue, "a", "b", None, "a", "c")
        await until(lambda: queue.pending.unfinished == 2)
        assert queue.pending.commit_point == 0
    assert sorted(journal.offsets) == [0, 1, 2, 4]


@either
@pytest.mark.parametrize("order", ["queue", "key"])
async def test_what_keeps_failing_becomes_a_dead_letter_and_the_rest_goes_on(
    order, asynchronous: bool
) -> None:
    journal, queue = Journal(), source()
    journal.fail = {0: [ValueError("no")] * 1_000, 2: [DeadLetter("useless")]}
    callback = journal.callback(asynchronous)
    async with consuming(order, callback, retries_in_order_max=3) as consumption:
        consumption.give(queue, *["a"] * 4)
        await until(lambda: done(queue))
        assert consumption.settler.taken == [(0, "ValueError: no", 4), (2, "useless", 1)]
    assert journal.offsets == [0, 0, 0, 0, 1, 2, 3]


@either
async def test_a_dead_letter_that_no_broker_takes_is_called_again(asynchronous: bool) -> None:
    journal, queue = Journal(), source()
    journal.fail = {0: [DeadLetter("useless")] * 2}
    async with consuming("key", journal.callback(asynchronous)) as consumption:
        consumption.settler.refuse = 2
        consumption.give(queue, "a", "a")
        await until(lambda: done(queue))
        assert [offset for offset, _, _ in consumption.settler.taken] == [0]
    assert journal.offsets == [0, 0, 1]


@either
async def test_before_that_the_broker_is_asked_again(asynchronous: bool) -> None:
    """It may have taken the dead letter, and not been able to say so."""
    journal, queue = Journal(), source()
    journal.fail = {0: [DeadLetter("useless")] * 2}
    async with consuming("key", journal.callback(asynchronous)) as consumption:
        consumption.settler.refuse = 1
        consumption.give(queue, "a", "a")
        await until(lambda: done(queue))
        assert consumption.settler.taken == [(0, "useless", 1)]
    assert journal.offsets == [0, 1]


@either
async def test_a_dropped_queue_is_not_asked_for_again(asynchronous: bool) -> None:
    journal, queue = Journal(), source()
    journal.fail = {0: [DeadLetter("useless")]}
    async with consuming("key", journal.callback(asynchronous)) as consumption:
        consumption.settler.refuse = 1
        consumption.settler.refused = queue.pending.drop
        consumption.give(queue, "a")
        await until(lambda: queue.pending.dropped)
        await consumption.dispatcher.quiet(queue)
        await until(lambda: not consumption.tasks)
        assert consumption.settler.taken == []


@either
async def test_messages_without_a_key_fail_each_for_itself(asynchronous: bool) -> None:
    journal, queue = Journal(), source()
    journal.fail = {0: [ValueError("no")], 2: [ValueError("no")] * 1_000}
    callback = journal.callback(asynchronous)
    async with consuming("key", callback, retries_in_order_max=1) as consumption:
        consumption.give(queue, *[None] * 4)
        await until(lambda: done(queue))
        assert [(offset, n) for offset, _, n in consumption.settler.taken] == [(2, 2)]
    assert sorted(journal.offsets) == [0, 0, 1, 2, 2, 3]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def renewed(clock: Clock, lease: Lease | None = None) -> Lease:
    lease = lease or Lease(10.0, clock)
    lease.begin()
    lease.sent()
    lease.heard(acknowledgement=False)
    return lease


@either
@pytest.mark.parametrize("order", ["queue", "key"])
async def test_nothing_starts_while_the_lease_is_over(order, asynchronous: bool) -> None:
    journal, queue, clock = Journal(), source(), Clock()
    lease = renewed(clock)
    gate = journal.hold(0)
    async with consuming(order, journal.callback(asynchronous), lease=lease) as consumption:
        consumption.give(queue, "a", "a", "a")
        await until(lambda: journal.offsets == [0])
        clock.now_s = 11.0  # as after SIGSTOP and SIGCONT, in the middle of a callback
        gate.set()
        await until(lambda: queue.pending.commit_point == 1)
        consumption.give(queue, "b", "a")
        await asyncio.sleep(0.02)
        assert journal.offsets == [0]
        renewed(clock, lease)
        await until(lambda: done(queue))
    assert sorted(journal.offsets) == list(range(5))
    assert [offset for offset, key, _ in journal.calls if key == "a"] == [0, 1, 2, 4]


@either
async def test_of_a_dropped_queue_nothing_more_starts(asynchronous: bool) -> None:
    journal, queue = Journal(), source()
    gate = journal.hold(0)
    async with consuming("queue", journal.callback(asynchronous)) as consumption:
        consumption.give(queue, *["a"] * 3)
        await until(lambda: journal.offsets == [0])
        queue.pending.drop()
        quiet = asyncio.create_task(consumption.dispatcher.quiet(queue))
        await asyncio.sleep(0.01)
        assert not quiet.done()
        gate.set()
        await quiet
        assert queue.pending.commit_point == 1  # the last result counts
    assert journal.offsets == [0]


@either
async def test_a_dropped_queue_is_not_quiet_while_a_dead_letter_is_on_its_way(
    asynchronous: bool,
) -> None:
    """Whenever that is asked: a release asks again and again, until all has ended."""
    journal, queue = Journal(), source()
    gate = journal.hold(1)
    journal.fail[0] = [DeadLetter("never")]
    async with consuming("key", journal.callback(asynchronous)) as consumption:
        consumption.settler.gate.clear()
        consumption.give(queue, "a", "b")
        await until(lambda: consumption.settler.asked == 1 and len(journal.calls) == 2)
        queue.pending.drop()
        gate.set()
        await until(lambda: not consumption.dispatcher._workers.busy())
        quiet = asyncio.create_task(consumption.dispatcher.quiet(queue))
        await asyncio.sleep(0.01)
        assert not quiet.done()
        consumption.settler.gate.set()
        await quiet
        assert queue.pending.commit_point == 2


@either
async def test_a_queue_taken_over_again_waits_for_its_last_callback(asynchronous: bool) -> None:
    journal, before = Journal(), source()
    gate = journal.hold(0)
    async with consuming("key", journal.callback(asynchronous)) as consumption:
        consumption.give(before, "a", "a")
        await until(lambda: journal.offsets == [0])
        before.pending.drop()
        after = source(start=0)
        consumption.give(after, "a", "a", "b")
        await asyncio.sleep(0.01)
        assert journal.offsets == [0]
        gate.set()
        await until(lambda: done(after))
        await consumption.dispatcher.quiet(after)
    assert [offset for offset, key, _ in journal.calls if key == "a"] == [0, 0, 1]
    assert journal.most["a"] == 1


@either
async def test_a_queue_taken_over_again_is_not_quiet_before_its_last_callback_has_ended(
    asynchronous: bool,
) -> None:
    """Else the next owner would begin beside it."""
    journal, before, after = Journal(), source(), source()
    gate = journal.hold(0)
    async with consuming("key", journal.callback(asynchronous)) as consumption:
        consumption.give(before, "a")
        await until(lambda: journal.offsets == [0])
        before.pending.drop()
        after.pending.drop()  # nothing of it was pulled yet
        quiet = asyncio.create_task(consumption.dispatcher.quiet(after))
        await asyncio.wait([quiet], timeout=0)  # it has looked
        assert not quiet.done()
        gate.set()
        await quiet


@either
async def test_lists_are_of_one_queue_in_order_and_fail_as_a_whole(asynchronous: bool) -> None:
    calls: list[list[int]] = []
    fail = [ValueError("no"), ValueError("again")]

    def receive(messages: list[Message]) -> None:
        calls.append([message.offset for message in messages])
        if messages[0].offset == 2 and fail:
            raise fail.pop()

    async def receive_async(messages: list[Message]) -> None:
        receive(messages)

    queue, callback = source(), receive_async if asynchronous else receive
    options = {"batch": True, "batch_messages_max": 2}
    async with consuming("queue", callback, **options) as consumption:
        consumption.give(queue, *["a", "b"] * 3)
        await until(lambda: done(queue))
    assert calls == [[0, 1], [2, 3], [2, 3], [2, 3], [4, 5]]


@either
async def test_with_keys_a_list_is_of_one_key(asynchronous: bool) -> None:
    calls: list[list[int]] = []

    def receive(messages: list[Message]) -> None:
        calls.append([message.offset for message in messages])
        if messages[0].offset == 0:
            raise ValueError("no")

    async def receive_async(messages: list[Message]) -> None:
        receive(messages)

    queue, callback = source(), receive_async if asynchronous else receive
    options = {"batch": True, "retries_in_order_max": 1}
    async with consuming("key", callback, **options) as consumption:
        consumption.give(queue, "a", "b", "a", "b")
        await until(lambda: done(queue))
        assert [offset for offset, _, _ in consumption.settler.taken] == [0, 2]
    assert sorted(calls) == [[0, 2], [0, 2], [1, 3]]


class Lists:
    """A callback for lists that names what it is told to, as often as it is told to."""

    def __init__(self, **fail: list[BaseException]) -> None:
        self.calls: list[list[int]] = []
        self.fail = {int(offset[1:]): errors for offset, errors in fail.items()}

    def callback(self, asynchronous: bool):
        def receive(messages: list[Message]) -> None:
            self.calls.append([message.offset for message in messages])
            failing = [message for message in messages if self.fail.get(message.offset)]
            if failing:
                raise BatchFailed({m: self.fail[m.offset].pop(0) for m in failing})

        async def receive_async(messages: list[Message]) -> None:
            receive(messages)

        return receive_async if asynchronous else receive


@either
async def test_in_order_what_lies_behind_the_first_that_is_named_comes_again(
    asynchronous: bool,
) -> None:
    lists, queue = Lists(m1=[ValueError("no")] * 2, m3=[DeadLetter("useless")] * 2), source()
    options = {"batch": True, "batch_messages_max": 5}
    async with consuming("queue", lists.callback(asynchronous), **options) as consumption:
        consumption.give(queue, *["a", "b"] * 3)
        await until(lambda: done(queue))
        assert consumption.settler.taken == [(3, "useless", 1)]
    assert lists.calls == [[0, 1, 2, 3, 4], [1], [1], [2, 3, 4, 5], [4, 5]]


@either
async def test_a_poison_message_becomes_a_dead_letter_without_its_mates(asynchronous: bool) -> None:
    lists, queue = Lists(m2=[ValueError("no")] * 100), source()
    options = {"batch": True, "retries_in_order_max": 2}
    async with consuming("key", lists.callback(asynchronous), **options) as consumption:
        consumption.give(queue, *["a", "b"] * 3)
        await until(lambda: done(queue))
        assert consumption.settler.taken == [(2, "ValueError: no", 3)]
    assert sorted(lists.calls) == [[0, 2, 4], [1, 3, 5], [2], [2], [4]]


@either
@pytest.mark.parametrize("order", ["key", None])
async def test_without_a_key_only_what_is_named_is_tried_again(order, asynchronous: bool) -> None:
    lists = Lists(m1=[ValueError("no")], m3=[RetryLater(0.002), ValueError("no"), ValueError("no")])
    queue = source()
    options = {"batch": True, "retries_in_order_max": 2}
    async with consuming(order, lists.callback(asynchronous), **options) as consumption:
        consumption.give(queue, *[None] * 5)
        await until(lambda: done(queue))
        assert consumption.settler.taken == [(3, "ValueError: no", 3)]
    assert sorted(lists.calls) == [[0, 1, 2, 3, 4], [1], [3], [3]]


@either
async def test_a_list_without_keys_that_failed_as_a_whole_may_fail_in_part(
    asynchronous: bool,
) -> None:
    calls: list[list[int]] = []

    def receive(messages: list[Message]) -> None:
        calls.append([message.offset for message in messages])
        if len(calls) == 1:
            raise ValueError("all of it")
        raise BatchFailed({m: ValueError("no") for m in messages if m.offset in (1, 2)})

    async def receive_async(messages: list[Message]) -> None:
        receive(messages)

    queue, callback = source(), receive_async if asynchronous else receive
    options = {"batch": True, "retries_in_order_max": 2}
    async with consuming("key", callback, **options) as consumption:
        consumption.give(queue, *[None] * 4)
        await until(lambda: done(queue))
        taken = sorted(consumption.settler.taken)
    assert taken == [(1, "ValueError: no", 3), (2, "ValueError: no", 3)]
    assert calls[:2] == [[0, 1, 2, 3]] * 2
    assert sorted(calls[2:]) == [[1], [2]]


@either
@pytest.mark.parametrize("order", ["queue", "key", None])
async def test_a_list_that_names_what_is_not_of_it_fails_as_a_whole(
    order, asynchronous: bool, caplog
) -> None:
    [stranger] = messages_of(source(start=99), None)
    lists, queue = Lists(), source()

    def receive(messages: list[Message]) -> None:
        lists.calls.append([message.offset for message in messages])
        if len(lists.calls) == 1:
            raise BatchFailed({messages[1]: ValueError("no"), stranger: ValueError("whose?")})

    async def receive_async(messages: list[Message]) -> None:
        receive(messages)

    callback = receive_async if asynchronous else receive
    async with consuming(order, callback, batch=True) as consumption:
        consumption.give(queue, *["a"] * 3)
        await until(lambda: done(queue))
        assert consumption.settler.taken == []
    assert lists.calls == [[0, 1, 2]] * 2
    assert "<Message m99 orders b0/0@99 0 bytes> is no message of this batch" in caplog.text


@either
@pytest.mark.parametrize("order", ["queue", "key", None])
async def test_many_failures_of_a_kind_are_one_traceback(order, asynchronous: bool, caplog) -> None:
    journal, queue = Journal(), source()
    journal.fail = {n: [ValueError(f"no {n}")] * 2 for n in range(100)}
    async with consuming(order, journal.callback(asynchronous)) as consumption:
        consumption.give(queue, *[f"k{number % 20}" for number in range(100)])
        await until(lambda: done(queue))
    assert len(journal.calls) == 300
    assert [(each.levelname, each.exc_info is not None) for each in caplog.records] == [
        ("WARNING", True)
    ]


@either
@pytest.mark.parametrize("order", ["queue", "key"])
async def test_order_holds_under_random_failures(order, asynchronous: bool) -> None:
    journal, dice = Journal(), random.Random(7)
    queues = [source(MessageQueue("orders", "b0", n), 10_000 * n) for n in range(3)]
    callback = journal.callback(asynchronous)
    async with consuming(order, callback, retries_in_order_max=2) as consumption:
        for _ in range(10):
            for number, queue in enumerate(queues):
                keys = [f"{number}{dice.choice('abcdefgh')}" for _ in range(50)]
                for offset in range(queue.pending.pull_offset, queue.pending.pull_offset + 50):
                    failures = dice.choice((0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3))
                    journal.fail[offset] = [ValueError("no")] * failures
                consumption.give(queue, *keys)
            await asyncio.sleep(0)
        await until(lambda: all(map(done, queues)))
    of: defaultdict[object, list[int]] = defaultdict(list)
    for offset, key, _ in journal.calls:
        of[offset // 10_000 if order == "queue" else key].append(offset)
    for offsets in of.values():
        assert offsets == sorted(offsets)
    assert set(journal.offsets) == {n * 10_000 + k for n in range(3) for k in range(500)}
    assert max(journal.most.values()) == 1


@either
@pytest.mark.parametrize("order", ["queue", "key", None])
async def test_what_is_not_taken_stays_unfinished(order, asynchronous: bool) -> None:
    journal, queue = Journal(), source()
    journal.fail = {1: [NotTaken()]}
    callback = journal.callback(asynchronous)
    async with consuming(order, callback, retries_in_order_max=0) as consumption:
        consumption.give(queue, "a", "a", "a")
        await until(lambda: queue.pending.commit_point == 1 and 1 in journal.offsets)
        assert consumption.settler.taken == []
    assert queue.pending.commit_point == 1
    assert journal.offsets.count(1) == 1


@either
@pytest.mark.parametrize("order", ["key", None])
async def test_a_message_that_takes_long_holds_up_its_own_key_only(
    order, asynchronous: bool
) -> None:
    """Also what the same worker had taken together with it, for quick callbacks."""
    journal, queue = Journal(), source()
    keys = [f"k{number}" if number % 2 else None for number in range(60)]
    async with consuming(order, journal.callback(asynchronous), threads=2) as consumption:
        for _ in range(20):  # so that it takes many at a time
            consumption.give(queue, *keys)
            await until(lambda: done(queue))
        start = queue.pending.pull_offset
        slow = journal.hold(start + 20)  # without a key
        consumption.give(queue, *keys, *keys)
        await until(lambda: queue.pending.unfinished == 1)
        assert queue.pending.commit_point == start + 20
        slow.set()
        await until(lambda: done(queue))
    assert Counter(journal.offsets) == Counter(range(start + 120))


@pytest.mark.parametrize("error", [None, ValueError("no")], ids=["done", "failed"])
@either
async def test_a_key_goes_on_although_another_one_of_its_run_takes_long(
    asynchronous: bool, error: ValueError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, queue = Journal(), source()
    journal.fail = {0: [error]} if error else {}
    slow = journal.hold(1)
    async with consuming("key", journal.callback(asynchronous), threads=2) as consumption:
        monkeypatch.setattr(in_place, "RUN_S", 60.0)  # a worker takes all that there is
        consumption.give(queue, "a", "b")
        await until(lambda: 1 in journal.offsets)
        consumption.give(queue, "a", "b")
        await until(lambda: 2 in journal.offsets and queue.pending.commit_point == 1)
        assert 3 not in journal.offsets
        slow.set()
        await until(lambda: done(queue))
    assert [offset for offset, key, _ in journal.calls if key == "a"] == [0] * bool(error) + [0, 2]
    assert [offset for offset, key, _ in journal.calls if key == "b"] == [1, 3]


@pytest.mark.parametrize("order", ["key", None])
@either
async def test_a_failure_is_tried_again_although_a_later_message_of_its_run_takes_long(
    order: str | None, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages without a key; the long one fails as well, once and not again for the others."""
    journal, queue = Journal(), source()
    journal.fail = {0: [ValueError("no")], 2: [ValueError("no")], 3: [ValueError("no")]}
    slow = journal.hold(3)
    async with consuming(order, journal.callback(asynchronous), threads=2) as consumption:
        monkeypatch.setattr(in_place, "RUN_S", 60.0)  # a worker takes all that there is
        consumption.give(queue, *[None] * 5)
        await until(lambda: queue.pending.commit_point == 3)
        await until(lambda: queue.pending.unfinished == 1)
        assert not slow.is_set()
        slow.set()
        await until(lambda: done(queue))
    assert Counter(journal.offsets) == {0: 2, 1: 1, 2: 2, 3: 2, 4: 1}


@either
async def test_what_waits_for_a_long_message_stays_behind_it(asynchronous: bool) -> None:
    journal, queue = Journal(), source()
    keys = [f"k{number % 20}" for number in range(60)]
    async with consuming("key", journal.callback(asynchronous), threads=2) as consumption:
        for _ in range(20):
            consumption.give(queue, *keys)
            await until(lambda: done(queue))
        start = queue.pending.pull_offset
        slow = journal.hold(start + 7)
        consumption.give(queue, *keys)
        await until(lambda: queue.pending.unfinished == 3)
        assert not {start + 27, start + 47} & set(journal.offsets)
        slow.set()
        await until(lambda: done(queue))
    assert [offset for offset, key, _ in journal.calls if key == "k7"][-3:] == [
        start + 7, start + 27, start + 47,
    ]  # fmt: skip
    assert Counter(journal.offsets) == Counter(range(start + 60))
