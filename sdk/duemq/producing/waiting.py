"""Waiting for a batch in the producer's event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duemq.producing.batch import Batch


async def until_done(batch: Batch) -> None:
    """Returns when the batch is stored or given up."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    if batch.on_done(wake):
        await waiter
