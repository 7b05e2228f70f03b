"""Long work in slices: the rest of the broker has the event loop for as long as each took."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from duemq.errors import InvalidArgument
from duemq.protocol.pieces import Pieces
from duemq.protocol.sql import TAG
from duemq.v1 import broker_pb2, group_pb2
from duemq_server.broker.filtering import filters

SLICE_S = 0.002
PAUSE_S_MAX = 0.01  # a slice may have been long because the machine was busy elsewhere

T = TypeVar("T")


class Slices:
    """Of one task's work."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def pause(self) -> None:
        """Others have the loop, if the slice has been long."""
        took_s = time.perf_counter() - self._began
        if took_s >= SLICE_S:
            await asyncio.sleep(min(took_s, PAUSE_S_MAX))
            self._began = time.perf_counter()

    async def work(self, pieces: Pieces[T]) -> T:
        """Does all of it."""
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                answer: T = end.value
                return answer
            await self.pause()


async def compile_expressions(
    subscribed: Iterable[broker_pb2.QueuePull] | Iterable[group_pb2.Subscription],
) -> None:
    """Compiles a request's filters in slices, for who parses them next.

    What is wrong with them is said then.  An expression of 4 KiB takes some 15 ms.
    """
    new = {
        (each.filter, each.filter_type)
        for each in subscribed
        if each.filter_type != TAG and not filters.is_compiled(each.filter)
    }
    if sum(len(text) for text, _ in new) > filters.CHARACTERS_KEPT_MAX:
        return  # refused
    slices = Slices()
    for text, filter_type in new:
        with suppress(InvalidArgument):
            filters.parse(text, filter_type)
        await slices.pause()
