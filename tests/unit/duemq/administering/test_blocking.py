"""What the synchronous admin client takes from the loop's thread, one after the other."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from duemq import Admin
from duemq.transport.loop_thread import LoopThread


class InterruptedHosted:
    """Ctrl-C comes during the first call, as soon as it waits."""

    closed = False

    def __init__(self, thread: LoopThread, waits: threading.Event) -> None:
        self._thread = thread
        self._waits = waits
        self._interrupted = False

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._interrupted:
            return self._thread.run(coroutine)
        self._interrupted = True
        future = asyncio.run_coroutine_threadsafe(coroutine, self._thread.loop)
        self._waits.wait()
        future.cancel()
        raise KeyboardInterrupt


def test_after_ctrl_c_what_is_under_way_ends_first() -> None:
    waits, ended = threading.Event(), threading.Event()

    async def pages() -> AsyncGenerator[str, None]:
        try:
            waits.set()
            await asyncio.Event().wait()
            yield "a page"
        finally:
            turn = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(turn.set_result, None)
            await turn  # to end takes a while
            ended.set()

    thread = LoopThread.acquire()
    try:
        admin = Admin.__new__(Admin)
        admin._hosted = InterruptedHosted(thread, waits)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            next(admin._each(pages()))
        assert ended.is_set()
    finally:
        thread.release()
