"""How a worker walks through a chunk; no threads here."""

import pytest

from duemq.consumer.workers import Caller, Work, is_async
from duemq.message import Message, Origin
from duemq.process_queue import Chunk, ProcessQueue
from duemq.rpc.backoff import Backoff
from duemq.v1.message_pb2 import Record


def chunk_of(count: int) -> Chunk[Message]:
    origin = Origin("orders", "b0", 0)
    messages = [Message(Record(message_id=f"m{n}"), origin, n, 0) for n in range(count)]
    return ProcessQueue[Message](0).add(messages, count, 1)


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


both = pytest.mark.parametrize("asynchronous", [False, True])


@both
async def test_messages_are_called_in_order_and_finished(asynchronous: bool) -> None:
    calls: list[int] = []
    work = Work(chunk_of(3))
    await walk(caller(either(lambda m: calls.append(m.offset), asynchronous)), work, asynchronous)
    assert calls == [0, 1, 2]
    assert work.chunk.commit_point == 3
    assert work.failures == []


@both
async def test_a_failure_is_set_aside_and_the_rest_goes_on(asynchronous: bool) -> None:
    def receive(message) -> None:
        if message.offset == 1:
            raise ValueError("one")

    work = Work(chunk_of(3))
    await walk(caller(either(receive, asynchronous)), work, asynchronous)
    [(index, error)] = work.failures
    assert (index, str(error)) == (1, "one")
    assert (work.chunk.commit_point, work.chunk.unfinished) == (1, 1)

    again = Work(work.chunk, index)
    await walk(caller(either(lambda message: None, asynchronous)), again, asynchronous)
    assert (work.chunk.commit_point, work.chunk.unfinished) == (3, 0)


@both
async def test_what_fails_again_stays_aside(asynchronous: bool) -> None:
    def receive(message) -> None:
        raise ValueError

    work = Work(chunk_of(1))
    await walk(caller(either(receive, asynchronous)), work, asynchronous)
    again = Work(work.chunk, 0)
    await walk(caller(either(receive, asynchronous)), again, asynchronous)
    assert [index for index, _ in again.failures] == [0]
    assert work.chunk.commit_point == 0


@both
async def test_nothing_is_begun_after_the_queue_is_dropped(asynchronous: bool) -> None:
    calls: list[int] = []
    work = Work(chunk_of(3))

    def receive(message) -> None:
        calls.append(message.offset)
        work.queue.dropped = True

    await walk(caller(either(receive, asynchronous)), work, asynchronous)
    assert calls == [0]
    assert work.chunk.commit_point == 1


@both
async def test_a_batch_is_finished_or_failed_as_a_whole(asynchronous: bool) -> None:
    work = Work(chunk_of(3))
    calls: list[list[int]] = []

    def receive(messages) -> None:
        calls.append([message.offset for message in messages])
        if len(calls) == 1:
            raise ValueError

    calling = caller(either(receive, asynchronous), batch=True)
    await walk(calling, work, asynchronous)
    assert [index for index, _ in work.failures] == [None]
    assert work.chunk.commit_point == 0
    await walk(calling, Work(work.chunk), asynchronous)
    assert calls == [[0, 1, 2]] * 2
    assert work.chunk.commit_point == 3


def test_even_an_exit_is_only_a_failure() -> None:
    def receive(message) -> None:
        raise SystemExit(1)

    work = Work(chunk_of(2))
    caller(receive).call(work)
    assert len(work.failures) == 2


def test_work_knows_how_often_it_failed() -> None:
    backoff = Backoff(0.001, 0.002)
    assert Work(chunk_of(1)).attempt == 0
    backoff.next_s()
    assert Work(chunk_of(1), 0, backoff).attempt == 1


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
