"""One broker's stream: frames out, answers in.

    IDLE ──want──► CONNECTING ──► UP ──broken──► WAITING (backoff) ──► CONNECTING …
                       └──────────failed─────────► WAITING

What is on its way, and what is sent again after a break, knows pumping/in_flight.py.  Owned by the
event loop.
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

from duemq.errors import DuemqError, Internal, Unavailable
from duemq.transport import streams
from duemq.transport.retrying import Backoff
from duemq.v1.view_pb2 import SendResponseView

if TYPE_CHECKING:
    from duemq.producing.pumping.in_flight import Frame
    from duemq.transport.cluster_client import Client

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
RECONNECT_S_MIN = 0.05
RECONNECT_S_MAX = 1.0


class LinkOwner(Protocol):
    """Whom a link tells what happens; called in the event loop."""

    def came_up(self, link: Link) -> list[Frame]:
        """A stream stands.  Answers what is sent on it first."""

    def answered(self, link: Link, answer: Any) -> None:
        """The broker's answer to the oldest frame.  Raises Internal if it is not that."""

    def broken(self, link: Link, error: DuemqError) -> None:
        """The stream broke or did not come up."""

    def idle(self, link: Link) -> bool:
        """Nothing of what was sent is without an answer."""

    def run(self) -> None:
        """The stream has room; what waits for this broker may want the link."""


class Link:
    """To one broker.  `want` it, and it connects; it stays connected until it breaks."""

    def __init__(self, client: Client, broker: str, owner: LinkOwner) -> None:
        self.broker = broker
        self._client = client
        self._owner = owner
        self._outgoing: deque[Frame] = deque()
        self._feeder_waits: asyncio.Future[None] | None = None
        self._wanted = asyncio.Event()
        self._retry_now = asyncio.Event()
        self._stream: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._given_up: DuemqError | None = None
        self._task = asyncio.create_task(self._run(), name=f"link to {broker}")

    def want(self) -> None:
        """Connects if it is idle."""
        self._wanted.set()

    def hurry(self) -> None:
        """The routes changed: a new attempt need not wait."""
        self._retry_now.set()

    def put(self, frame: Frame) -> None:
        """Sends a frame.  Only while the stream is up."""
        self._outgoing.append(frame)
        if self._feeder_waits is not None and not self._feeder_waits.done():
            self._feeder_waits.set_result(None)

    def reset(self, error: DuemqError) -> None:
        """Gives the stream up, for a new one."""
        if self._stream is not None:
            self._given_up = error
            self._stream.cancel()

    async def close(self) -> None:
        """Ends the stream."""
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
                level = logging.INFO if backoff.attempts == 0 else logging.DEBUG
                log.log(level, "broker %s: no stream: %s", self.broker, error)
                self._owner.broken(self, error)
            except Exception as error:  # an answer that is none; without this task nothing leaves
                log.exception("broker %s: its stream is given up", self.broker)
                self._owner.broken(self, Internal(f"{self.broker}: {error!r}"))
            self._retry_now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    await self._retry_now.wait()
            if self._owner.idle(self):
                self._wanted.clear()
                self._owner.run()  # wants it again if anything waits for it

    async def _serve(self, backoff: Backoff) -> None:
        broker = self._client.broker(self.broker)
        address = broker.address
        await _connected(channel := self._client.channel(address), address)
        stream: grpc.aio.StreamStreamCall[Any, Any] = channel.stream_stream(
            "/duemq.v1.Broker/SendStream",
            request_serializer=None,
            response_deserializer=SendResponseView.FromString,
        )(metadata=broker.meant)
        self._stream = stream
        self._outgoing = deque(self._owner.came_up(self))
        feeder = asyncio.create_task(self._feed(stream), name=f"feed {self.broker}")
        try:
            self._owner.run()
            while True:
                self._owner.answered(self, await streams.read(stream, address))
                backoff.reset()
        except Unavailable as error:
            raise self._given_up or error from None
        finally:
            self._stream = self._given_up = None
            feeder.cancel()
            stream.cancel()

    async def _feed(self, stream: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        outgoing, loop = self._outgoing, asyncio.get_running_loop()
        # A broken stream fails its reader too, which deals with it.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                while outgoing:
                    frame = outgoing.popleft()
                    frame.sent_ms = time.monotonic() * 1000
                    await stream.write(frame.encoded)
                self._feeder_waits = loop.create_future()
                await self._feeder_waits


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
    except grpc.aio.UsageError:  # closed meanwhile: the broker is another address by now
        raise Unavailable(f"{address}: the connection was closed") from None
