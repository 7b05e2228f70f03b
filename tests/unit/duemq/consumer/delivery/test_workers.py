"""How a worker walks through a chunk; no threads here."""

import asyncio
import threading

import pytest

from duemq.consumer.delivery.chunk_work import Caller, Work
from duemq.consumer.delivery.workers import ThreadWorkers, is_async
from duemq.consumer.fetching.fetcher import Source
from duemq.consumer.fetching.subscription import ALL
from duemq.message import Message, Origin
from duemq.outcomes import BatchFailed
from duemq.protocol.balance import MessageQueue
from duemq.v1.message_pb2 import Record


def work_of(count: int) -> Work:
    """A chunk that nobody has touched."""
    source = Source(MessageQueue("orders", "b0", 0), ALL, 1, 0)
    origin = Origin("orders", "b0", 0)
    messages = [Message(Record(message_id=f"m{n}"), origin, n, 0) for n in range(count)]
    return Work(source, source.pending.add(messages, count, 1))


def caller(callback, *, batch: bool = False) -> Caller:
    return Caller(callback, batch=batch, group="g", client_id="c")


async def walk(caller: Caller, work: Work, asynchronous: bool) -> None:
    if asynchronous:
        await caller.call_async(work)
    else:
        caller.call(work)


def either(callback, asynchronous: bool):
    """The callback, or a coroutine function that does the same."""

    async def awaited(item):
        callback(item)

    return awaited if asynchronous else callback


def failed(work: Work) -> list[int]:
    return [index for errors in work.failures for index in errors]


both = pytest.mark.parametrize("asynchronous", [False, True])


@both
async def test_messages_are_called_in_order_and_finished(asynchronous: bool) -> None:
    calls: list[int] = []
    work = work_of(3)
    await walk(caller(either(lambda m: calls.append(m.offset), asynchronous)), work, asynchronous)
    assert calls == [0, 1, 2]
    assert work.chunk.commit_point == 3
    assert work.failures == []


@both
async def test_a_failure_is_set_aside_and_the_rest_goes_on(asynchronous: bool) -> None:
    def receive(message) -> None:
        if message.offset == 1:
            raise ValueError("one")

    work = work_of(3)
    await walk(caller(either(receive, asynchronous)), work, asynchronous)
    [errors] = work.failures
    assert {index: str(error) for index, error in errors.items()} == {1: "one"}
    assert (work.chunk.commit_point, work.chunk.unfinished) == (1, 1)


@both
@pytest.mark.parametrize("batch", [False, True])
async def test_what_is_tried_again_says_whether_it_is_done(asynchronous, batch) -> None:
    heals = [False, True]

    def receive(item) -> None:
        if not heals.pop(0):
            raise ValueError

    calling = caller(either(receive, asynchronous), batch=batch)
    first = work_of(1)
    first.chunk.set_aside()
    again = [Work(first.source, first.chunk, (0,)) for _ in range(2)]
    for work in again:
        await walk(calling, work, asynchronous)
    assert [(work.finished, failed(work)) for work in again] == [((), [0]), ((0,), [])]
    assert first.chunk.commit_point == 0  # finishing it is the event loop's business


@both
async def test_nothing_is_begun_after_the_queue_is_dropped(asynchronous: bool) -> None:
    calls: list[int] = []
    work = work_of(3)

    def receive(message) -> None:
        calls.append(message.offset)
        work.pending.drop()

    await walk(caller(either(receive, asynchronous)), work, asynchronous)
    assert calls == [0]
    assert work.chunk.commit_point == 1


@both
@pytest.mark.parametrize("fails", [False, True])
async def test_a_worker_that_was_cut_off_has_no_say_any_more(asynchronous, fails) -> None:
    calls: list[int] = []
    work = work_of(4)

    def receive(message) -> None:
        calls.append(message.offset)
        if message.offset == 1:
            assert work.chunk.cut_off(1)
            if fails:
                raise ValueError

    calling = caller(either(receive, asynchronous))
    await walk(calling, work, asynchronous)
    assert calls == [0, 1]
    assert (work.chunk.commit_point, work.chunk.unfinished) == (1, 3)
    rest = Work(work.source, work.chunk)
    await walk(calling, rest, asynchronous)
    assert calls == [0, 1, 2, 3]
    assert (work.chunk.commit_point, work.chunk.unfinished) == (1, 1)
    work.chunk.finish_aside(1)
    assert work.chunk.commit_point == 4


@both
async def test_a_batch_is_finished_or_failed_as_a_whole(asynchronous: bool) -> None:
    calls: list[list[int]] = []

    def receive(messages) -> None:
        calls.append([message.offset for message in messages])
        if len(calls) == 1:
            raise ValueError

    calling = caller(either(receive, asynchronous), batch=True)
    failing, fine = work_of(3), work_of(3)
    await walk(calling, failing, asynchronous)
    await walk(calling, fine, asynchronous)
    assert calls == [[0, 1, 2]] * 2
    assert failed(failing) == [0, 1, 2]
    assert (failing.chunk.commit_point, failing.chunk.unfinished) == (0, 3)
    assert (fine.failures, fine.chunk.commit_point) == ([], 3)


def failing_at(*offsets: int):
    """A callback for lists."""

    def receive(messages) -> None:
        raise BatchFailed({m: ValueError(str(m.offset)) for m in messages if m.offset in offsets})

    return receive


@both
@pytest.mark.parametrize(
    ("named", "commit_point"), [((1, 3), 1), ((0,), 0), ((4,), 4), (range(5), 0), ((), 5)]
)
async def test_of_a_batch_only_what_is_named_is_set_aside(
    named, commit_point, asynchronous: bool
) -> None:
    work = work_of(5)
    calling = caller(either(failing_at(*named), asynchronous), batch=True)
    await walk(calling, work, asynchronous)
    [errors] = work.failures
    assert {index: str(error) for index, error in errors.items()} == {n: str(n) for n in named}
    assert work.chunk.commit_point == commit_point
    assert work.chunk.unfinished == len(named)


@both
async def test_what_is_named_of_a_batch_that_is_tried_again(asynchronous: bool) -> None:
    first = work_of(5)
    first.chunk.set_aside(5)
    again = Work(first.source, first.chunk, (0, 2, 4))
    await walk(caller(either(failing_at(2), asynchronous), batch=True), again, asynchronous)
    assert (again.finished, failed(again)) == ((0, 4), [2])


@both
async def test_a_single_message_may_be_named_too(asynchronous: bool) -> None:
    def receive(message) -> None:
        raise BatchFailed({message: ValueError("one")} if message.offset == 1 else {})

    work = work_of(3)
    await walk(caller(either(receive, asynchronous)), work, asynchronous)
    assert failed(work) == [1]
    assert (work.chunk.commit_point, work.chunk.unfinished) == (1, 1)


def test_even_an_exit_is_only_a_failure() -> None:
    def receive(message) -> None:
        raise SystemExit(1)

    work = work_of(2)
    caller(receive).call(work)
    assert failed(work) == [0, 1]


@pytest.mark.parametrize(
    "error", [SystemExit(1), GeneratorExit(), asyncio.CancelledError(), BatchFailed({})]
)
@pytest.mark.parametrize("batch", [False, True])
async def test_so_it_is_in_a_task(error: BaseException, batch: bool) -> None:
    async def receive(item) -> None:
        raise error

    work = work_of(2)
    await caller(receive, batch=batch).call_async(work)
    assert failed(work) == ([] if isinstance(error, BatchFailed) else [0, 1])


async def test_ctrl_c_is_only_a_failure_where_it_cannot_come_from_the_keyboard() -> None:
    async def receive(message) -> None:
        raise KeyboardInterrupt

    in_main_thread, elsewhere = work_of(1), work_of(1)
    with pytest.raises(KeyboardInterrupt):
        await caller(receive).call_async(in_main_thread)
    assert failed(in_main_thread) == []
    await asyncio.to_thread(asyncio.run, caller(receive).call_async(elsewhere))
    assert failed(elsewhere) == [0]


@pytest.mark.parametrize("hides_it", [False, True])
async def test_a_task_that_is_cancelled_begins_nothing_more(hides_it: bool) -> None:
    begun = asyncio.Event()

    async def receive(message) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not hides_it:
                raise

    work = work_of(2)
    task = asyncio.create_task(caller(receive).call_async(work))
    await begun.wait()
    task.cancel()
    await asyncio.wait_for(task, 60)
    assert (failed(work), work.walk.next) == ([] if hides_it else [0], 1)


def test_a_coroutine_that_outlives_its_loop_is_closed() -> None:
    async def receive(message) -> None:
        await asyncio.Event().wait()

    work = work_of(1)
    running = caller(receive).call_async(work)
    loop = asyncio.new_event_loop()
    loop.call_soon(running.send, None)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    running.close()
    assert failed(work) == []


def test_what_is_to_be_awaited_is_told_from_what_is_not() -> None:
    async def function(message) -> None: ...

    class Callable:
        async def __call__(self, message) -> None: ...

        async def method(self, message) -> None: ...

    assert is_async(function)
    assert is_async(Callable())
    assert is_async(Callable().method)
    assert not is_async(print)
    assert not is_async(lambda message: None)


async def test_threads_that_the_system_refuses_are_not_waited_for(monkeypatch) -> None:
    """A close says nothing of them: why there are none is told where they were to start."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = ThreadWorkers(caller(lambda message: None), 2, lambda work: None)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start"):
            workers.start()
    await workers.stop(60.0)
