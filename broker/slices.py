"""Long work in slices: the rest of the broker has the event loop for as long as each took."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from duemq.errors import InvalidArgument
from duemq.protocol.filters import TAG
from duemq.protocol.pieces import Pieces
from duemq.v1 import broker_pb2, group_pb2
from duemq_server.broker.filtering.filters import Expressions

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


async def compiled(
    subscribed: Iterable[broker_pb2.QueuePull] | Iterable[group_pb2.Subscription],
) -> Expressions:
    """The SQL expressions of a request: one of 4 KiB takes some 15 ms.

    What is wrong with them is said by who parses the request.
    """
    expressions, slices = Expressions(), Slices()
    with suppress(InvalidArgument):
        for each in subscribed:
            if each.filter_type != TAG:
                expressions.parse(each.filter, each.filter_type)
                await slices.pause()
    return expressions
