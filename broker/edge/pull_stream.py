"""One PullStream: many pulls at a time, each answered when it has something, in whatever order.

A write that is under way is never cancelled: gRPC could not end the call with a status then.  So a
wrong request, a stop of the broker, whatever ends the stream: the pulls that are being answered
get their answers, then comes the status.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from duemq.errors import DuemqError, InvalidArgument, Overloaded
from duemq.protocol import checks
from duemq.v1 import broker_pb2
from duemq_server.broker.edge.pulls.parking import Parked
from duemq_server.broker.filtering.filters import Expressions
from duemq_server.broker.reading import pull_encoding
from duemq_server.broker.reading.pull import Pull, parse
from duemq_server.broker.reading.pull_encoding import QueueAnswer
from duemq_server.broker.slices import compiled
from duemq_server.serving.unsent import BudgetShare, Unsent

WAITING_MAX = 1_024
# Answers of one stream that are read from the log and not yet taken by the connection.
UNWRITTEN_MAX = 2


@dataclass(eq=False, slots=True, kw_only=True)
class ParkedPull(Parked):
    """A pull until its last answer."""

    pull: Pull
    cancelled: bool = False
    unwritten: "asyncio.Semaphore | None" = None
    """Bounds the answers of a stream whose client does not read."""
    share: BudgetShare | None = None
    """Of the answer that is there, or being read."""

    async def take_place(self, unsent: Unsent) -> None:
        """Waits until another answer may be in memory."""
        if self.unwritten is not None:
            await self.unwritten.acquire()
        try:
            self.share = await unsent.take(self.peer, self.pull.bytes_next)
        except BaseException:
            if self.unwritten is not None:
                self.unwritten.release()
            raise

    def give_place(self) -> None:
        """The answer is written, or there was none."""
        if self.share is not None:
            self.share.give_back()
            self.share = None
            if self.unwritten is not None:
                self.unwritten.release()


class Pulls(Protocol):
    """What answers pulls."""

    async def head(self, request: broker_pb2.PullRequest) -> broker_pb2.PullResponse:
        """All of an answer but the records."""

    async def answer(self, parked: ParkedPull) -> list[QueueAnswer]:
        """The next answer of a pull."""

    def cancel(self, parked: ParkedPull) -> None:
        """Has a pull answered with what there is."""

    def is_parked(self, parked: ParkedPull) -> bool:
        """Whether a pull waits for something to answer."""


class PullStream:
    """Used once: `run`."""

    def __init__(self, pulls: Pulls, write: Callable[[bytes], Awaitable[None]], peer: str) -> None:
        self._pulls = pulls
        self._write = write
        self._peer = peer
        self._waiting: dict[int, ParkedPull] = {}
        self._tasks: dict[asyncio.Task[None], ParkedPull] = {}
        self._lock = asyncio.Lock()  # guards the stream: one write at a time
        self._unwritten = asyncio.Semaphore(UNWRITTEN_MAX)
        self._reader: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    async def run(self, requests: AsyncIterator[broker_pb2.PullRequest]) -> None:
        """Until the client or an error ends it."""
        self._reader = asyncio.current_task()
        assert self._reader is not None
        try:
            try:
                async for request in requests:
                    self._take(request, await compiled(request.queues))
                await self._answered()
            except asyncio.CancelledError:
                if self._error is None:
                    raise  # the client went away
                self._reader.uncancel()
            except (DuemqError, DecodeError) as error:
                self._error = self._error or error
            if self._error is not None:
                for task, parked in self._tasks.items():
                    parked.cancelled = True
                    if self._pulls.is_parked(parked):
                        task.cancel()
                await self._answered()
                raise self._error
        finally:
            for task in self._tasks:
                task.cancel()

    def end(self, error: Exception) -> None:
        """Ends the stream with this error, once what waits is answered."""
        if self._error is None and self._reader is not None:
            self._error = error
            self._reader.cancel()

    async def _answered(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _take(self, request: broker_pb2.PullRequest, expressions: Expressions) -> None:
        """Raises Overloaded, InvalidArgument."""
        if request.cancel_request_id:  # 0 is no number of a request that is to be cancelled
            cancelled = self._waiting.get(request.cancel_request_id)
            if cancelled is not None:
                self._pulls.cancel(cancelled)
        if request.credit_request_id:
            _extend(self._waiting.get(request.credit_request_id), request)
        elif request.queues or not request.cancel_request_id:
            if len(self._waiting) >= WAITING_MAX or request.request_id in self._waiting:
                raise _refused(len(self._waiting), request.request_id)
            pull = parse(request, expressions)
            parked = ParkedPull(pull=pull, peer=self._peer, unwritten=self._unwritten)
            self._waiting[request.request_id] = parked
            task = asyncio.create_task(self._answer(request, parked))
            self._tasks[task] = parked
            task.add_done_callback(self._tasks.pop)

    async def _answer(self, request: broker_pb2.PullRequest, parked: ParkedPull) -> None:
        pull = parked.pull
        try:
            head = await self._pulls.head(request)
            while not pull.ended:
                answers = await self._pulls.answer(parked)
                if pull.ended or parked.cancelled:
                    pull.ended = True
                    del self._waiting[request.request_id]
                if self._error is not None and not answers and not head.commits:
                    return
                head.open = not pull.ended
                async with self._lock:
                    await self._write(pull_encoding.encode(head.SerializeToString(), answers))
                parked.give_place()
                head.ClearField("commits")
        except Exception as error:
            self.end(error)
        finally:
            parked.give_place()
            if self._waiting.get(request.request_id) is parked:
                del self._waiting[request.request_id]


def _extend(parked: ParkedPull | None, request: broker_pb2.PullRequest) -> None:
    """Raises the credit of a standing pull, unless it is over.  Raises InvalidArgument."""
    if request.queues or request.cancel_request_id:
        raise checks.wrong(
            "credit_request_id", request.credit_request_id, "0: it goes in a request of its own"
        )
    if parked is not None:
        parked.pull.extend(request)


def _refused(waiting: int, request_id: int) -> DuemqError:
    if waiting >= WAITING_MAX:
        return Overloaded(
            f"request_id: {waiting} pulls of this stream wait, the most allowed",
            field="request_id",
            value=request_id,
            limit=WAITING_MAX,
        )
    return InvalidArgument(
        f"request_id: {request_id} is waiting already", field="request_id", value=request_id
    )
