import asyncio
import threading
from concurrent.futures import _base as futures
from itertools import count

import pytest

from duemq.errors import Closed
from duemq.transport import channel, loop_thread
from duemq.transport.loop_thread import LoopThread
from tests.interruption import interrupted


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
    thread, hand_over, answers = LoopThread.acquire(), loop_thread._Call, []

    async def answer() -> int:
        return 1

    def collecting(*given):
        monkeypatch.setattr(loop_thread, "_Call", hand_over)
        answers.append(thread.run(answer()))
        return hand_over(*given)

    monkeypatch.setattr(loop_thread, "_Call", collecting)

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


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_the_loop_waits_for_no_caller_that_was_interrupted() -> None:
    """At whatever line of Python's own `threading` and `concurrent.futures`, too."""
    thread = LoopThread.acquire()
    files = {threading.__file__, futures.__file__, loop_thread.__file__}

    async def answer() -> int:
        return 1

    for at in count(1):
        was, answers = interrupted(lambda: thread.run(answer()), at, files.__contains__), []
        caller = threading.Thread(target=lambda: answers.append(thread.run(answer())), daemon=True)  # noqa: B023
        caller.start()
        caller.join(30)
        assert answers == [1]
        if not was:
            break
    assert at > 10
    thread.release()


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_whatever_line_a_signal_interrupts_nothing_of_the_call_goes_on() -> None:
    thread = LoopThread.acquire()
    files = {loop_thread.__file__, asyncio.base_events.__file__, asyncio.selector_events.__file__}

    async def forever() -> None:
        await asyncio.Event().wait()

    async def left() -> int:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        _, going_on = await asyncio.wait(others, timeout=5) if others else ((), ())
        return len(going_on)

    for at in count(1):
        before_the_wait = interrupted(
            lambda: thread.run(forever()), at, files.__contains__, latest="answer"
        )
        assert thread.run(left()) == 0, at
        if not before_the_wait:
            break
    assert at > 5
    thread.release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_ends_badly_leaves_nobody_waiting() -> None:
    thread, running, dead, ended = LoopThread.acquire(), threading.Event(), threading.Event(), []

    async def stays() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise SystemExit

    async def ends() -> None:
        raise SystemExit

    def call(coroutine, when) -> None:
        when.wait(30)
        try:
            thread.run(coroutine)
        except (Closed, SystemExit) as error:
            ended.append(type(error))

    now = threading.Event()
    now.set()
    callers = [
        threading.Thread(target=call, args=given, daemon=True)
        for given in ((stays(), dead), (stays(), now), (ends(), running))
    ]
    for each in callers:
        each.start()
    thread._thread.join(30)
    dead.set()
    for each in callers:
        each.join(30)
    LoopThread._shared = None
    assert len(ended) == len(callers)
    assert Closed in ended
