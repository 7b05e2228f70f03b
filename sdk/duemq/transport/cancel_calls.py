"""Cancels on their way to timer shards: while one request is under way, the next gathers.

A request costs both sides far more than a handle, so that callers who cancel at the same time share
one.  Nobody waits for a request that takes long: the next one goes after `GATHER_S`.
A shared request does not wait at the shard for messages that have not arrived there; whoever asks
again asks alone, and that request waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grpc
import grpc.aio

from duemq.errors import Internal, Timeout
from duemq.transport import status
from duemq.v1 import stubs, timer_pb2
from duemq.v1.message_pb2 import TimerHandle

GATHER_S = 0.005  # the longest wait for an earlier request
SHARE_MAX = 100  # handles of one caller; more go alone
SHARED_MAX = 1_000  # handles of a request that is shared

Results = Sequence[timer_pb2.CancelResult]


class _Part(NamedTuple):
    """One caller's handles."""

    handles: Sequence[TimerHandle]
    left_s: float
    results: asyncio.Future[Results]


class CancelCalls:
    """All cancels of a client."""

    def __init__(self, channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._channel = channel
        self._shared: dict[str, _SharedCalls] = {}  # by address; those with something under way

    async def ask(
        self, address: str, handles: Sequence[TimerHandle], left_s: float, *, may_share: bool
    ) -> Results:
        """A result for each handle.  Raises Unavailable, Timeout, Closed."""
        if not may_share or len(handles) > SHARE_MAX:
            request = timer_pb2.CancelRequest(handles=handles)
            return await call(self._channel(address), address, request, left_s)
        shared = self._shared.get(address)
        if shared is None:
            shared = self._shared[address] = _SharedCalls(self._channel, address)
            shared.on_idle = lambda: self._shared.pop(address)
        part = _Part(handles, left_s, asyncio.get_running_loop().create_future())
        shared.add(part)
        try:
            async with asyncio.timeout(left_s):
                return await part.results
        except TimeoutError:
            raise Timeout(f"{address}: no answer to a cancel within {left_s:g} s") from None


class _SharedCalls:
    """Requests that are shared, to one address."""

    def __init__(self, channel: Callable[[str], grpc.aio.Channel], address: str) -> None:
        self.on_idle: Callable[[], object] = lambda: None
        self._channel = channel
        self._address = address
        self._waiting: deque[_Part] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._next: asyncio.Handle | None = None  # until then what comes is gathered

    def add(self, part: _Part) -> None:
        """To be sent now, or with what gathers."""
        self._waiting.append(part)
        if self._next is None:  # whoever was answered together comes back together
            self._next = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._next = None
        parts: list[_Part] = []
        room = SHARED_MAX
        while self._waiting and len(self._waiting[0].handles) <= room:
            part = self._waiting.popleft()
            if not part.results.done():  # its caller may have given up
                room -= len(part.handles)
                parts.append(part)
        if not parts:
            if not self._calls:
                self.on_idle()
            return
        task = asyncio.create_task(self._call(parts))
        self._calls.add(task)
        gather = asyncio.get_running_loop().call_later(GATHER_S, self._send)
        self._next = gather
        task.add_done_callback(lambda done: self._ended(done, gather))

    def _ended(self, task: asyncio.Task[None], gather: asyncio.Handle) -> None:
        self._calls.discard(task)
        if self._next is gather:
            gather.cancel()
            self._send()
        elif self._next is None and not self._calls:
            self.on_idle()

    async def _call(self, parts: Sequence[_Part]) -> None:
        request = timer_pb2.CancelRequest(
            handles=[handle for part in parts for handle in part.handles],
            do_not_wait=len(parts) > 1,
        )
        try:
            left_s = max(part.left_s for part in parts)
            results = await call(self._channel(self._address), self._address, request, left_s)
        except BaseException as error:
            for part in parts:
                if part.results.done():
                    continue
                if isinstance(error, asyncio.CancelledError):
                    part.results.cancel()
                else:
                    part.results.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        start = 0
        for part in parts:
            end = start + len(part.handles)
            if not part.results.done():
                part.results.set_result(results[start:end])
            start = end


async def call(
    channel: grpc.aio.Channel, address: str, request: timer_pb2.CancelRequest, left_s: float
) -> Results:
    """One request; a result for each of its handles."""
    stub = stubs.TimerStub(channel)
    answer = await status.answer(stub.Cancel(request, timeout=left_s), address)
    given, asked = len(answer.results), len(request.handles)
    if given != asked:
        raise Internal(f"{address} answered {given} of {asked} handles")
    return answer.results
