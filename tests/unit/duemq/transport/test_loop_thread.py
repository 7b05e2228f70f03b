import asyncio
import threading

import pytest

from duemq.errors import Closed
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
            refused.wait(5)

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


def test_a_call_that_comes_after_the_loop_ended_raises_closed() -> None:
    thread = LoopThread.acquire()
    thread.release()

    async def nothing() -> None:
        pass

    with pytest.raises(Closed):
        thread.run(nothing())
