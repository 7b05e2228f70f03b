import asyncio
import threading

import pytest

from duemq.errors import Closed
from duemq.transport import channel
from duemq.transport.loop_thread import LoopThread


def test_a_call_that_the_end_of_the_loop_interrupts_raises_closed() -> None:
    thread, running, raised = LoopThread.acquire(), threading.Event(), []

    async def forever() -> None:
        running.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            thread.run(forever())
        except Closed as error:
            raised.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert running.wait(30)
    thread.release()
    caller.join(30)
    assert [type(error) for error in raised] == [Closed]


def test_a_call_that_comes_as_the_loop_ends_raises_closed() -> None:
    thread, running, ending = LoopThread.acquire(), threading.Event(), threading.Event()
    refused = threading.Event()

    async def ends_late() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            refused.wait(60)

    async def forever() -> None:
        await asyncio.Event().wait()

    def wait() -> None:
        with pytest.raises(Closed):
            thread.run(ends_late())

    def call() -> None:
        ending.wait(30)
        with pytest.raises(Closed):
            thread.run(forever())
        refused.set()

    first = threading.Thread(target=wait)
    second = threading.Thread(target=call, daemon=True)
    first.start()
    second.start()
    assert running.wait(30)
    thread.release()
    first.join(30)
    second.join(30)
    assert refused.is_set()


def test_a_finalizer_may_call_while_another_call_is_handed_over(monkeypatch) -> None:
    thread, hand_over, answers = LoopThread.acquire(), asyncio.run_coroutine_threadsafe, []

    async def answer() -> int:
        return 1

    def collecting(coroutine, loop):
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", hand_over)
        answers.append(thread.run(answer()))
        return hand_over(coroutine, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", collecting)

    def call() -> None:
        answers.append(thread.run(answer()))

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(30)
    assert answers == [1, 1]
    thread.release()


def test_a_child_is_refused_whoever_held_the_lock_at_the_fork(monkeypatch) -> None:
    def refuse() -> None:
        raise Closed("this process was forked")

    monkeypatch.setattr(channel, "check_fork", refuse)
    refused: list[Closed] = []

    def acquire() -> None:
        try:
            LoopThread.acquire()
        except Closed as error:
            refused.append(error)

    caller = threading.Thread(target=acquire, daemon=True)
    with LoopThread._lock:
        caller.start()
        caller.join(30)
    assert len(refused) == 1


def test_a_call_that_comes_after_the_loop_ended_raises_closed() -> None:
    thread = LoopThread.acquire()
    thread.release()

    async def nothing() -> None:
        pass

    with pytest.raises(Closed):
        thread.run(nothing())


def test_a_signal_that_comes_as_the_thread_is_looked_at_does_not_end_it(monkeypatch) -> None:
    thread = LoopThread.acquire()

    async def answer() -> int:
        return 1

    # So Python 3.11 leaves a thread whose `is_alive` was interrupted.
    monkeypatch.setattr(thread._thread, "is_alive", lambda: False)
    assert thread.run(answer()) == 1
    monkeypatch.undo()
    thread.release()
