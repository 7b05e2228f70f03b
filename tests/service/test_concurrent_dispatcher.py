"""Concurrent consumption without brokers: slow, hanging and failing callbacks."""

import asyncio
import logging
import random
import re
import threading
import time
from contextlib import asynccontextmanager

import pytest

from duemq.consumer.delivery import concurrent
from duemq.consumer.delivery.chunk_work import Caller, Work
from duemq.consumer.delivery.concurrent import ConcurrentDispatcher
from duemq.consumer.fetching.fetcher import Source
from duemq.consumer.fetching.process_queue import Chunk
from duemq.consumer.fetching.subscription import ALL
from duemq.consumer.settings import ConsumerSettings
from duemq.message import Message, Origin
from duemq.outcomes import BatchFailed, DeadLetter, NotTaken, Outcome, RetryLater
from duemq.protocol.balance import MessageQueue
from duemq.v1.message_pb2 import Record
from tests.service.running_cluster import until

QUICK = {"retry_wait_s_min": 0.001, "retry_wait_s_max": 0.01}


class FakeSettler:
    """Takes what is sent back, unless told otherwise."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, Outcome, int]] = []
        self.refusing = False
        self.silent = 0
        """So many are taken without an answer: the next time they are duplicates."""
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def send_back(self, source, message, outcome, deliveries) -> bool:
        self.asked += 1
        await self.gate.wait()
        if self.refusing:
            return False
        if message.offset not in self.offsets:
            self.taken.append((message.offset, outcome, deliveries))
        self.silent -= 1
        return self.silent < 0

    @property
    def offsets(self) -> list[int]:
        return sorted(offset for offset, _, _ in self.taken)


class Bench:
    """A dispatcher and one queue."""

    def __init__(self, callback, *, batch: bool, settings: ConsumerSettings) -> None:
        self.settler = FakeSettler()
        self.tasks: set[asyncio.Task[None]] = set()
        self.dispatcher = ConcurrentDispatcher(
            callback,
            batch=batch,
            settings=settings,
            settler=self.settler,
            progressed=self._progressed,
            spawn=self._spawn,
        )
        self.source = Source(MessageQueue("orders", "b0", 0), ALL, 1, 0)
        self.room_to = 0
        """The commit point when the fetcher was told last that there may be room."""

    def _progressed(self, source: Source) -> None:
        self.room_to = source.pending.commit_point

    def _spawn(self, work):
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def pull(self, count: int) -> None:
        """The next messages of the queue."""
        first = self.source.pending.pull_offset
        origin = Origin("orders", "b0", 0)
        offsets = range(first, first + count)
        messages = [Message(Record(message_id=f"m{n}"), origin, n, 0) for n in offsets]
        self.dispatcher.dispatch(self.source, messages, first + count, count)

    @property
    def commit_point(self) -> int:
        return self.source.pending.commit_point


@asynccontextmanager
async def bench(callback, *, batch: bool = False, **settings):
    made = Bench(callback, batch=batch, settings=ConsumerSettings(**{**QUICK, **settings}))
    made.dispatcher.start()
    try:
        yield made
    finally:
        made.source.pending.drop()
        await made.dispatcher.stop(5.0)
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


class Script:
    """A callback that blocks where it is told to; for threads and for tasks."""

    def __init__(self, asynchronous: bool) -> None:
        self.blocking: set[int] = set()
        self.failing: dict[int, BaseException] = {}
        self.release = threading.Event()
        self.arelease = asyncio.Event()
        self.calls: list[int] = []
        self.done: list[int] = []
        self.cancelled: list[int] = []
        self.callback = self.receive_async if asynchronous else self.receive

    def receive(self, item) -> None:
        offset = self._begin(item)
        if offset in self.blocking:
            assert self.release.wait(60)
        self.done.append(offset)

    async def receive_async(self, item) -> None:
        offset = self._begin(item)
        if offset in self.blocking:
            try:
                await self.arelease.wait()
            except asyncio.CancelledError:
                self.cancelled.append(offset)
                raise
        self.done.append(offset)

    def _begin(self, item) -> int:
        offset = item[0].offset if isinstance(item, list) else item.offset
        self.calls.append(offset)
        if offset in self.failing:
            raise self.failing[offset]
        return offset

    def let_go(self) -> None:
        self.blocking.clear()
        self.release.set()
        self.arelease.set()


both = pytest.mark.parametrize("asynchronous", [False, True])


@pytest.fixture
def script(asynchronous: bool):
    made = Script(asynchronous)
    yield made
    made.release.set()


# --- slow -------------------------------------------------------------------------------------


@both
async def test_a_slow_message_holds_up_neither_its_chunk_nor_its_queue(script) -> None:
    async with bench(script.callback, threads=2) as b:
        b.pull(1_000)
        await until(lambda: b.commit_point == 1_000)
        script.blocking = {1_001}
        b.pull(1_000)  # in chunks of many by now
        await until(lambda: len(script.done) == 1_999)
        assert b.commit_point == 1_001
        b.pull(500)
        await until(lambda: len(script.done) == 2_499)
        assert b.commit_point == 1_001
        script.let_go()
        await until(lambda: b.commit_point == 2_500)
        assert sorted(script.done) == sorted(script.calls) == list(range(2_500))
        assert b.settler.taken == []


@both
async def test_the_fetcher_hears_of_the_room_that_is_there_once_failures_are_sent_back(
    script,
) -> None:
    """Nothing more would come of a queue of whose window all have failed."""
    async with bench(script.callback) as b:
        b.settler.gate.clear()
        script.failing = {n: ValueError("no") for n in range(3)}
        b.pull(3)
        await until(lambda: b.settler.asked == 3)
        assert b.room_to == 0
        b.settler.gate.set()
        await until(lambda: b.room_to == 3)


@both
async def test_a_slow_message_that_fails_is_sent_back(script) -> None:
    async with bench(script.callback, threads=2) as b:
        b.pull(1_000)
        await until(lambda: b.commit_point == 1_000)
        script.blocking = {1_001}
        b.pull(64)
        await until(lambda: len(script.done) == 1_063)

        def fail(offset: int) -> None:
            if offset == 1_001:
                raise ValueError("at last")

        script.done = type("Done", (), {"append": staticmethod(fail)})()
        script.let_go()
        await until(lambda: b.commit_point == 1_064)
        assert b.settler.taken == [(1_001, Outcome("ValueError: at last"), 1)]


@both
async def test_a_worker_that_is_cut_off_tells_of_earlier_failures_at_once(script) -> None:
    async with bench(script.callback, threads=2) as b:
        b.pull(1_000)
        await until(lambda: b.commit_point == 1_000)
        script.failing = {1_000: ValueError("no")}
        script.blocking = {1_001}
        b.pull(64)
        await until(lambda: b.commit_point == 1_001)
        assert b.settler.offsets == [1_000]
        script.let_go()


@both
async def test_a_worker_that_is_stuck_in_its_last_message_tells_of_earlier_failures(
    script, monkeypatch
) -> None:
    async with bench(script.callback, threads=2) as b:
        # Two messages a chunk.
        monkeypatch.setattr(concurrent, "CHUNK_MESSAGES_MAX", 2)
        monkeypatch.setattr(concurrent, "CHUNK_S", 1.0)
        script.failing = {0: ValueError("no")}
        script.blocking = {1}
        b.pull(2)
        await until(lambda: b.commit_point == 1)
        assert b.settler.offsets == [0]
        script.let_go()
        await until(lambda: b.commit_point == 2)
        assert script.done.count(1) == 1


async def test_every_message_ends_in_one_way_however_often_workers_are_cut_off(monkeypatch) -> None:
    """Workers are looked at all the time, and callbacks end at any moment of a look."""
    monkeypatch.setattr(concurrent, "LOOK_S", 0.0005)
    monkeypatch.setattr(concurrent, "SLOW_S", 0.001)
    count = 20_000
    chance = random.Random(7)
    slow = {n: chance.uniform(0, 0.003) for n in chance.sample(range(count), 400)}
    failing = set(chance.sample(range(count), 1_000))
    done: list[int] = []
    cut = threading.Event()
    cut_off = Chunk.cut_off

    def noticed(chunk, index, count=1) -> bool:
        cut.set()
        return cut_off(chunk, index, count)

    monkeypatch.setattr(Chunk, "cut_off", noticed)

    def receive(message) -> None:
        if message.offset % 5_000 == 0:  # so often at least, on whatever machine
            assert cut.wait(60)
            cut.clear()
        if message.offset in slow:
            time.sleep(slow[message.offset])
        if message.offset in failing:
            raise ValueError
        done.append(message.offset)

    logging.getLogger("duemq.consumer.delivery.concurrent").setLevel(logging.ERROR)
    try:
        async with bench(receive, threads=4) as b:
            # Of one message nothing is cut off: chunks stay large, however slow the machine is.
            monkeypatch.setattr(concurrent, "CHUNK_S", 1.0)
            for past in range(1_000, count + 1, 1_000):
                b.pull(1_000)
                await until(lambda past=past: b.commit_point == past)
            assert b.source.pending.unfinished == 0
            assert sorted(done) == sorted(set(range(count)) - failing)
            assert b.settler.offsets == sorted(failing)
    finally:
        logging.getLogger("duemq.consumer.delivery.concurrent").setLevel(logging.NOTSET)


class Starved:
    """A worker that has taken something, and gets no processor before it begins with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chosen = threading.Event()
        self.go = threading.Event()
        call = Caller.call

        def starved(caller: Caller, work: Work) -> None:
            if not self.chosen.is_set():
                self.chosen.set()
                assert self.go.wait(60)
            call(caller, work)

        monkeypatch.setattr(Caller, "call", starved)


async def test_what_a_worker_was_cut_off_from_before_it_began_is_done(monkeypatch) -> None:
    starved = Starved(monkeypatch)
    done: list[int] = []
    async with bench(lambda message: done.append(message.offset), threads=2) as b:
        monkeypatch.setattr(concurrent, "CHUNK_S", 1.0)  # all in one chunk
        b.pull(3)
        await until(lambda: done == [1, 2])
        starved.go.set()
        await until(lambda: b.commit_point == 3)
        assert done == [1, 2, 0]
        assert b.source.pending.unfinished == 0


async def test_what_timed_out_before_it_began_is_not_called_beside(monkeypatch) -> None:
    starved = Starved(monkeypatch)
    done: list[int] = []
    settings = {"threads": 1, "processing_timeout_s": 0.1, "batch_messages_max": 3}
    async with bench(done.extend, batch=True, **settings) as b:
        b.pull(3)
        await until(lambda: b.commit_point == 3)
        assert b.settler.offsets == [0, 1, 2]
        starved.go.set()
        b.pull(3)
        await until(lambda: b.commit_point == 6)
    assert [message.offset for message in done] == [3, 4, 5]


# --- hanging ----------------------------------------------------------------------------------


@both
async def test_what_takes_too_long_is_sent_back_and_its_result_ignored(script) -> None:
    script.blocking = {1}
    async with bench(script.callback, threads=1, processing_timeout_s=0.1) as b:
        b.pull(3)
        await until(lambda: b.commit_point == 3)
        assert b.settler.taken == [(1, Outcome("timed out after 0.1 s"), 1)]
        assert sorted(script.done) == [0, 2]
        script.let_go()
        b.pull(3)
        await until(lambda: b.commit_point == 6)
        assert b.settler.offsets == [1]


@both
async def test_a_batch_that_takes_too_long_is_sent_back_as_a_whole(script) -> None:
    script.blocking = {0}
    settings = {"threads": 1, "processing_timeout_s": 0.1, "batch_messages_max": 3}
    async with bench(script.callback, batch=True, **settings) as b:
        b.pull(5)
        await until(lambda: b.commit_point == 5)
        assert b.settler.offsets == [0, 1, 2]
        assert script.calls == [0, 3]


@both
async def test_workers_that_hang_are_replaced_up_to_a_bound(script) -> None:
    script.blocking = set(range(10))
    async with bench(script.callback, threads=2, processing_timeout_s=0.05) as b:
        b.pull(12)
        if script.callback == script.receive_async:  # a task can be cancelled
            await until(lambda: b.commit_point == 12)
            assert sorted(script.cancelled) == list(range(10))
            assert sorted(script.done) == [10, 11]
        else:
            await until(lambda: b.settler.offsets == [0, 1, 2, 3])
            assert len(script.calls) == 4  # twice the threads, and none is left
            script.let_go()
            await until(lambda: b.commit_point == 12)
            # Who was given up hangs on nobody: its thread ends when it gets a processor.
            await until(lambda: set(script.done) == set(range(12)))


async def test_a_task_that_does_not_let_itself_be_cancelled_is_replaced_all_the_same() -> None:
    stubborn = asyncio.Event()
    calls: list[int] = []

    async def receive(message) -> None:
        calls.append(message.offset)
        while message.offset == 0 and not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue

    async with bench(receive, threads=1, processing_timeout_s=0.05) as b:
        b.pull(3)
        await until(lambda: b.commit_point == 3)
        assert (calls, b.settler.offsets) == ([0, 1, 2], [0])
        stubborn.set()
        b.pull(1)
        await until(lambda: b.commit_point == 4)
        assert calls == [0, 1, 2, 3]


async def test_what_hangs_is_only_sent_back_again_if_the_broker_did_not_take_it() -> None:
    script = Script(asynchronous=False)
    script.blocking = {0}
    async with bench(script.callback, threads=1, processing_timeout_s=0.05) as b:
        b.settler.refusing = True
        b.pull(2)
        await until(lambda: b.settler.asked > 3)
        assert (script.calls, b.commit_point) == ([0, 1], 0)
        b.settler.refusing = False
        await until(lambda: b.commit_point == 2)
        assert (script.calls, b.settler.offsets) == ([0, 1], [0])
        script.let_go()


# --- failing ----------------------------------------------------------------------------------


@both
async def test_failures_are_sent_back_as_they_ask_for(script) -> None:
    script.failing = {
        1: ValueError("no"),
        3: RetryLater("5m", "closed"),
        4: DeadLetter("unreadable"),
    }
    async with bench(script.callback) as b:
        b.pull(6)
        await until(lambda: b.commit_point == 6)
        assert sorted(b.settler.taken, key=lambda each: each[0]) == [
            (1, Outcome("ValueError: no"), 1),
            (3, Outcome("closed", delay_ms=300_000), 1),
            (4, Outcome("unreadable", dead_letter=True), 1),
        ]
        assert sorted(script.calls) == list(range(6))


@both
async def test_a_callback_that_exits_has_failed_and_nothing_more(script) -> None:
    script.failing = {0: SystemExit(3), 1: GeneratorExit()}
    async with bench(script.callback, threads=1) as b:
        b.pull(3)
        await until(lambda: b.commit_point == 3)
        assert (b.settler.offsets, script.done) == ([0, 1], [2])


@both
@pytest.mark.parametrize("batch", [False, True])
async def test_nothing_is_finished_before_the_broker_has_it(script, batch) -> None:
    script.failing = {0: ValueError("no")}
    async with bench(script.callback, batch=batch) as b:
        b.settler.gate.clear()
        b.pull(4)
        await until(lambda: b.settler.asked == (4 if batch else 1))
        assert b.commit_point == 0
        b.settler.gate.set()
        await until(lambda: b.commit_point == 4)
        assert b.settler.offsets == ([0, 1, 2, 3] if batch else [0])


@both
@pytest.mark.parametrize("batch", [False, True])
async def test_what_the_broker_does_not_take_is_tried_again_here(script, batch) -> None:
    script.failing = {0: ValueError("no")}
    async with bench(script.callback, batch=batch) as b:
        b.settler.refusing = True
        b.pull(2)
        await until(lambda: script.calls.count(0) > 2)
        assert b.commit_point == 0
        del script.failing[0]
        await until(lambda: b.commit_point == 2)
        assert b.settler.taken == []


async def test_attempts_here_count_as_deliveries(caplog) -> None:
    caplog.set_level(logging.DEBUG, "duemq.consumer")
    attempts: list[int] = []

    async def receive(message) -> None:
        attempts.append(message.attempt)
        if len(attempts) == 3:
            b.settler.refusing = False
        raise ValueError("no")

    async with bench(receive) as b:
        b.settler.refusing = True
        b.pull(1)
        await until(lambda: b.commit_point == 1)
        assert attempts == [1, 2, 3]
        assert b.settler.taken == [(0, Outcome("ValueError: no"), 3)]
    assert [int(each) for each in re.findall(r"attempt (\d+)", caplog.text)] == attempts


@both
@pytest.mark.parametrize("batch", [False, True])
async def test_what_the_broker_took_and_could_not_say_so_is_not_called_again(script, batch) -> None:
    script.failing = {0: ValueError("no")}
    async with bench(script.callback, batch=batch) as b:
        b.settler.silent = count = 3 if batch else 1
        b.pull(3)
        await until(lambda: b.commit_point == 3)
        assert script.calls.count(0) == 1
        assert b.settler.asked == 2 * count
        assert b.settler.taken == [(n, Outcome("ValueError: no"), 1) for n in range(count)]


@both
async def test_a_dropped_queue_is_quiet_when_its_failures_are_sent_back(script) -> None:
    script.failing = {0: ValueError("no")}
    async with bench(script.callback) as b:
        b.settler.gate.clear()
        b.pull(1)
        await until(lambda: b.settler.asked == 1)
        b.source.pending.drop()
        quiet = asyncio.create_task(b.dispatcher.quiet(b.source))
        await asyncio.sleep(0.02)
        assert not quiet.done()
        b.settler.gate.set()
        async with asyncio.timeout(30):
            await quiet
        assert b.commit_point == 1


async def test_what_hangs_does_not_keep_a_dropped_queue_from_being_quiet() -> None:
    script = Script(asynchronous=False)
    script.blocking = {0}
    async with bench(script.callback, processing_timeout_s=0.05) as b:
        b.pull(1)
        await until(lambda: b.commit_point == 1)
        b.source.pending.drop()
        async with asyncio.timeout(30):
            await b.dispatcher.quiet(b.source)
        assert script.done == []
        script.let_go()


# --- some of a batch --------------------------------------------------------------------------


class Lists:
    """A callback for lists that names what it is told to."""

    def __init__(self, asynchronous: bool) -> None:
        self.calls: list[list[int]] = []
        self.failing: dict[int, BaseException] = {}
        self.stranger: object = None
        self.callback = self.receive_async if asynchronous else self.receive

    def receive(self, messages) -> None:
        self.calls.append([message.offset for message in messages])
        failures = {m: self.failing[m.offset] for m in messages if m.offset in self.failing}
        if self.stranger is not None:
            failures[self.stranger] = ValueError("whose?")
        if failures:
            raise BatchFailed(failures)

    async def receive_async(self, messages) -> None:
        self.receive(messages)


@pytest.fixture
def lists(asynchronous: bool) -> Lists:
    return Lists(asynchronous)


@both
async def test_of_a_batch_only_what_is_named_is_sent_back_as_it_asks_for(lists) -> None:
    lists.failing = {
        1: ValueError("no"),
        3: RetryLater("5m", "closed"),
        4: DeadLetter("unreadable"),
    }
    async with bench(lists.callback, batch=True) as b:
        b.pull(6)
        await until(lambda: b.commit_point == 6)
        assert sorted(b.settler.taken, key=lambda each: each[0]) == [
            (1, Outcome("ValueError: no"), 1),
            (3, Outcome("closed", delay_ms=300_000), 1),
            (4, Outcome("unreadable", dead_letter=True), 1),
        ]
        assert lists.calls == [list(range(6))]
        assert b.source.pending.unfinished == 0


@both
async def test_the_others_of_a_batch_are_done_before_the_broker_answers(lists) -> None:
    lists.failing = {2: ValueError("no")}
    async with bench(lists.callback, batch=True) as b:
        b.settler.gate.clear()
        b.pull(4)
        await until(lambda: b.settler.asked == 1)
        assert (b.commit_point, b.source.pending.unfinished) == (2, 1)
        b.settler.gate.set()
        await until(lambda: b.commit_point == 4)


@both
async def test_what_is_named_and_not_taken_is_tried_again_here_without_the_others(lists) -> None:
    lists.failing = {1: ValueError("no"), 3: RetryLater("1h")}
    async with bench(lists.callback, batch=True) as b:
        b.settler.refusing = True
        b.pull(5)
        await until(lambda: len(lists.calls) >= 3)
        assert lists.calls[:3] == [[0, 1, 2, 3, 4], [1, 3], [1, 3]]
        assert (b.commit_point, b.source.pending.unfinished) == (1, 2)
        del lists.failing[1]
        await until(lambda: b.commit_point == 3)
        b.settler.refusing = False
        await until(lambda: b.commit_point == 5)
        assert b.settler.offsets == [3]
        assert all(call in ([1, 3], [3]) for call in lists.calls[1:])


@both
async def test_a_batch_that_names_what_is_not_of_it_is_sent_back_as_a_whole(lists, caplog) -> None:
    lists.failing = {1: ValueError("no")}
    lists.stranger = Message(Record(message_id="m9"), Origin("orders", "b0", 9), 1, 0)
    async with bench(lists.callback, batch=True) as b:
        b.pull(3)
        await until(lambda: b.commit_point == 3)
        assert b.settler.offsets == [0, 1, 2]
        [reason] = {outcome.error for _, outcome, _ in b.settler.taken}
        assert reason.startswith("InvalidArgument: failures: <Message m9 ")
    assert caplog.text.count("is no message of this batch") >= 1
    assert "in receive" in caplog.text  # the traceback says who raised it


@both
async def test_what_is_named_as_not_taken_stays_unfinished(lists) -> None:
    lists.failing = {1: NotTaken(), 2: ValueError("no")}
    async with bench(lists.callback, batch=True) as b:
        b.pull(4)
        await until(lambda: b.source.pending.unfinished == 1)
        assert (b.commit_point, b.settler.offsets) == (1, [2])
        assert len(lists.calls) == 1


# --- logging ----------------------------------------------------------------------------------


@both
async def test_a_thousand_failures_of_a_kind_are_one_traceback(script, caplog) -> None:
    caplog.set_level(logging.INFO, "duemq.consumer")
    failing = {n: ValueError(f"no {n}") for n in range(0, 1_000, 2)}
    failing |= {n: RetryLater("1h") for n in range(1, 1_000, 2)}
    script.failing = dict(failing)
    async with bench(script.callback) as b:
        b.pull(1_000)
        await until(lambda: b.commit_point == 1_000)
    said = [(each.levelname, each.exc_info is not None) for each in caplog.records]
    assert sorted(said) == [("INFO", False), ("WARNING", True)]
    assert len(b.settler.taken) == 1_000
