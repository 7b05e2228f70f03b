"""Waiting for a batch in an event loop: the producer's, or one of another thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duemq.producing.batch import Batch


async def until_done(batch: Batch) -> None:
    """Returns when the batch is stored or given up."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    waiter: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def wake() -> None:
        if threading.get_ident() == thread:
            end()
        else:
            with suppress(RuntimeError):  # that loop is closed: nobody waits any more
                loop.call_soon_threadsafe(end)

    if batch.on_done(wake):
        await waiter
