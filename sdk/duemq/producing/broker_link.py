"""One broker's stream: what is on its way there, and what is sent again when it breaks.

    IDLE ──want──► CONNECTING ──► UP ──broken──► WAITING (backoff) ──► CONNECTING …
                       └──────────failed─────────► WAITING

A frame that is in flight when the stream breaks is sent again, first and in the old order: its
outcome is unknown, and the same numbers make the broker store it once.  From then on it is
*repeated*: a refusal no longer proves that it is not stored, so it is kept and, after what is in
flight behind it, sent again, here and nowhere else.  Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from duemq.errors import DuemqError, Internal, Timeout, Unavailable
from duemq.transport import status
from duemq.transport.retrying import Backoff
from duemq.v1.view_pb2 import SendResponseView

if TYPE_CHECKING:
    from duemq.producing.batch import Batch
    from duemq.transport.cluster_client import Client

log = logging.getLogger(__name__)

METHOD = "/duemq.v1.Broker/SendStream"
CONNECT_TIMEOUT_S = 5.0
RECONNECT_S_MIN = 0.05
RECONNECT_S_MAX = 1.0


class Frame:
    """A request: batches for one broker that travel together."""

    __slots__ = ("batches", "encoded", "repeated", "sent", "size")

    def __init__(self, batches: list[Batch], *, repeated: bool = False) -> None:
        """The batches are encoded.  `repeated`: they may be stored by an earlier attempt."""
        self.batches = batches
        self.repeated = repeated
        self.encoded = (
            batches[0].encoded
            if len(batches) == 1
            else b"".join([batch.encoded for batch in batches])
        )
        self.size = sum(batch.size for batch in batches)
        self.sent = 0.0

    @property
    def request_id(self) -> int:
        """The last batch's number: that of merged requests (see `encoding`)."""
        return self.batches[-1].number


class Owner(Protocol):
    """Whom a link tells what happens; called in the event loop."""

    def answered(self, link: Link, frame: Frame, answer: Any, took_s: float) -> list[Batch]:
        """A frame's answer.  Answers which of its batches are to be sent again as they are."""

    def broken(self, link: Link, error: DuemqError) -> None:
        """The stream broke or did not come up."""

    def pump(self) -> None:
        """The link has room."""


class Link:
    """To one broker.  `want` it, and it connects; it stays connected until it breaks."""

    def __init__(self, client: Client, broker: str, in_flight_max: int, owner: Owner) -> None:
        self.broker = broker
        self.in_flight_bytes = 0
        self.paused_until = 0.0
        """Takes no new frames before this time (monotonic), after a refusal."""
        self.last_error: DuemqError | None = None
        self.sent = 0.0
        """When the last frame was put (monotonic)."""
        self._client = client
        self._in_flight_max = in_flight_max
        self._owner = owner
        self._unanswered: deque[Frame] = deque()
        # Repeated frames that were refused.  All of `_unanswered` is behind them.
        self._kept: list[Frame] = []
        self._outgoing: deque[Frame] = deque()
        self._feeder_waits: asyncio.Future[None] | None = None
        self._wanted = asyncio.Event()
        self._retry_now = asyncio.Event()
        self._up = False
        self._stream: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._task = asyncio.create_task(self._run(), name=f"link to {broker}")

    @property
    def in_flight(self) -> bool:
        """A frame is on its way for the first time, so that its answer is worth waiting for."""
        return bool(self._unanswered) and not self._unanswered[-1].repeated

    def ready(self, now: float) -> bool:
        """A frame may be put."""
        return (
            self._up
            and not self._kept
            and len(self._unanswered) < self._in_flight_max
            and now >= self.paused_until
        )

    @property
    def up(self) -> bool:
        """The stream stands."""
        return self._up

    def want(self) -> None:
        """Connects if it is idle."""
        self._wanted.set()

    def hurry(self) -> None:
        """The routes changed: a new attempt need not wait."""
        self._retry_now.set()

    def put(self, frame: Frame) -> None:
        """Sends a frame.  Only when `ready`."""
        self.sent = time.monotonic()
        self.in_flight_bytes += frame.size
        self._send(frame)

    def repeat(self, now: float) -> None:
        """Sends the frames again that were kept, if it is time."""
        if self._kept and self._up and not self._unanswered and now >= self.paused_until:
            kept, self._kept = self._kept, []
            for frame in self._still_wanted(kept):
                self._send(frame)

    def keeps(self, batch: Batch) -> bool:
        """It was refused and waits to be sent again: nothing of it is on its way."""
        return any(batch in frame.batches for frame in self._kept)

    def _send(self, frame: Frame) -> None:
        self._unanswered.append(frame)
        self._outgoing.append(frame)
        if self._feeder_waits is not None and not self._feeder_waits.done():
            self._feeder_waits.set_result(None)

    def reset(self, error: DuemqError) -> None:
        """Gives the stream up, for a new one."""
        self._up = False
        self.last_error = error
        if self._stream is not None:
            self._stream.cancel()

    async def close(self) -> None:
        """Ends the stream."""
        self._up = False
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        backoff = Backoff(RECONNECT_S_MIN, RECONNECT_S_MAX)
        while True:
            await self._wanted.wait()
            try:
                await self._serve(backoff)
            except DuemqError as error:
                self._up = False
                level = logging.INFO if backoff.attempts == 0 else logging.DEBUG
                log.log(level, "broker %s: no stream: %s", self.broker, error)
                self.last_error = error
                self._owner.broken(self, error)
            self._retry_now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    await self._retry_now.wait()
            if not (self._unanswered or self._kept):
                self._wanted.clear()
                self._owner.pump()  # wants it again if anything waits for it

    async def _serve(self, backoff: Backoff) -> None:
        address = self._client.broker(self.broker).address
        channel = self._client.channel(address)
        await _connected(channel, address)
        stream: grpc.aio.StreamStreamCall[Any, Any] = channel.stream_stream(
            METHOD, request_serializer=None, response_deserializer=SendResponseView.FromString
        )()
        self._stream = stream
        frames = self._still_wanted([*self._kept, *self._unanswered])
        self._kept = []
        self._unanswered = deque(frames)
        self._outgoing = deque(frames)
        feeder = asyncio.create_task(self._feed(stream), name=f"feed {self.broker}")
        self._up = True
        try:
            self._owner.pump()
            while True:
                answer = await status.answer(stream.read(), address)
                if answer is grpc.aio.EOF:
                    raise Unavailable(f"{address}: the broker ended the stream")
                backoff.reset()
                self._answered(answer)
        except asyncio.CancelledError:
            if self._task.cancelling():
                raise
            # `reset` cancelled the call, not us.
            raise self.last_error or Timeout(f"{address}: the stream was given up") from None
        finally:
            self._up = False
            self._stream = None
            feeder.cancel()
            stream.cancel()

    async def _feed(self, stream: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        outgoing, loop = self._outgoing, asyncio.get_running_loop()
        # A broken stream fails its reader too, which deals with it.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                while outgoing:
                    frame = outgoing.popleft()
                    frame.sent = time.monotonic()
                    await stream.write(frame.encoded)
                self._feeder_waits = loop.create_future()
                await self._feeder_waits

    def _answered(self, answer: Any) -> None:
        if not self._unanswered or self._unanswered[0].request_id != answer.request_id:
            raise Internal(
                f"broker {self.broker} answered request {answer.request_id}, which is not next"
            )
        frame = self._unanswered.popleft()
        self.in_flight_bytes -= frame.size
        if len(answer.results) != len(frame.batches):
            self._unanswered.appendleft(frame)
            self.in_flight_bytes += frame.size
            raise Internal(
                f"broker {self.broker} answered {len(answer.results)} batches "
                f"of {len(frame.batches)}"
            )
        again = self._owner.answered(self, frame, answer, time.monotonic() - frame.sent)
        if again:
            kept = Frame(again, repeated=True)
            self._kept.append(kept)
            self.in_flight_bytes += kept.size
        self._owner.pump()

    def _still_wanted(self, frames: list[Frame]) -> list[Frame]:
        """The frames to repeat, without the batches that were given up; all that is in flight."""
        wanted: list[Frame] = []
        for frame in frames:
            batches = [batch for batch in frame.batches if not batch.done]
            frame.repeated = True
            if len(batches) == len(frame.batches):
                wanted.append(frame)
            elif batches:
                wanted.append(Frame(batches, repeated=True))
        self.in_flight_bytes = sum(frame.size for frame in wanted)
        return wanted


async def _connected(channel: grpc.aio.Channel, address: str) -> None:
    """Waits for the connection before anything is sent: what was not sent may go elsewhere."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise Unavailable(f"{address}: cannot connect")
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        raise Unavailable(f"{address}: no connection within {CONNECT_TIMEOUT_S} s") from None
