"""The asyncio producer; the synchronous one is a face of it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Unpack

from duemq.errors import Closed, DuemqError, NotAllSent, Overloaded, Timeout
from duemq.message import Outgoing, SendOptions
from duemq.producing.cancels import Cancelling
from duemq.producing.intake import EARLY_BATCHES_MAX, Intake, has_timer_keys
from duemq.producing.keyed.calls import TimerCalls
from duemq.producing.keyed.intake import KeyedIntake
from duemq.producing.losses import Losses, log_unanswered
from duemq.producing.outbox import Outbox, Target
from duemq.producing.receipt import AwaitableReceipt, PendingReceipt, Receipts, until_done
from duemq.producing.rescheduling import Rescheduling
from duemq.producing.sender import Sender
from duemq.producing.turns import Turns
from duemq.protocol import checks
from duemq.protocol.moments import Moment
from duemq.protocol.retry_policy import Delay
from duemq.sent import Receipt
from duemq.settings import Addresses, ProducerSettings
from duemq.transport.closing import AsyncClient
from duemq.transport.cluster_client import Client


class Producer(AsyncClient, Cancelling, Rescheduling):
    """Sends messages.  Safe to use from many tasks of one event loop.

    Messages that wait for the same broker travel together; nothing waits while the way is free.
    `await start()` (or `async with`) connects, `await close()` sends what is left and raises if it
    could not.
    """

    def __init__(
        self,
        nameserver: Addresses | None = None,
        *,
        on_error: Callable[[AwaitableReceipt, DuemqError], object] | None = None,
        settings: ProducerSettings | None = None,
    ) -> None:
        """`nameserver`: `host:port`, several separated by commas; None: DUEMQ_NAMESERVER's.

        `on_error`: called in the event loop for each submitted message that is not stored, unless
        its receipt was awaited before; instead of the error of `close`.
        """
        self._settings = ProducerSettings() if settings is None else settings
        checks.instance("settings", self._settings, ProducerSettings)
        self._client = Client(nameserver, self._settings.client)
        self._timer_calls = TimerCalls(self._client)
        self._losses = Losses(AwaitableReceipt, on_error)
        self._sender: Sender | None = None
        self.targets: dict[str, Target] = {}
        self._begun_before = 0
        self._turns = Turns()  # for room
        self._closed = False
        self._closing = asyncio.Lock()  # guards the end
        self._blocking = False
        self._unclosed: weakref.finalize[..., Producer] | None = None

    def _serve_blocking(
        self, on_error: Callable[[PendingReceipt, DuemqError], object] | None
    ) -> None:
        """It is the core of a `duemq.Producer`: callers are in other threads."""
        self._blocking = True
        self._losses = Losses(PendingReceipt, on_error)

    async def start(self) -> None:
        """Connects.  Raises Unavailable if no nameserver answers: it may be tried again."""
        if self._sender is not None or self._closed:
            return
        await self._client.start()
        if self._sender is not None or self._closed:
            return
        self._timer_calls.start()
        settings = self._settings
        loop, blocking = asyncio.get_running_loop(), self._blocking

        def wake_pump() -> None:
            if blocking:
                loop.call_soon_threadsafe(sender.run)
            else:
                sender.run()

        def check() -> None:
            # Elsewhere nothing would ever wake who waits.
            if not blocking and asyncio._get_running_loop() is not loop:
                raise Closed("the producer belongs to another event loop")

        self.outbox = Outbox(settings.buffer_bytes, settings.frame_bytes, wake_pump, check)
        self._sender = sender = Sender(self._client, settings, self.outbox, self._losses)
        keyed = KeyedIntake(self.outbox, self._timer_calls, sender, settings.send_timeout_s)
        gathered = sender.pump.open, sender.pump.early, self.outbox.arrivals, keyed
        self._unclosed = weakref.finalize(self, log_unanswered, *gathered)
        # At exit, what is left in a blocking one is sent after that.
        self._unclosed.atexit = not blocking
        self.intake = Intake(self.outbox, keyed)
        self.targets = sender.pump.targets

    async def send(self, topic: str, body: bytes, **options: Unpack[SendOptions]) -> Receipt:
        """Sends a message and waits until it is stored durably.  As `duemq.Producer.send`."""
        if options.get("timer_key") is not None:
            await self._shards_known()
        known = topic in self.targets
        if not known and len(self._early_target(topic).growing) >= EARLY_BATCHES_MAX:
            await self._open_target(topic)
        await self._room()  # no longer: sends leave in the order of their calls
        pending = self.submit(topic, body, **options)
        pending._batch.tell(pending._index)  # who cancels this does not ask
        return await pending

    def submit(
        self,
        topic: str,
        body: bytes,
        *,
        key: str | None = None,
        tag: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: Delay | None = None,
        deliver_at: Moment | None = None,
        delay_level: int | None = None,
        timer_key: str | None = None,
        if_absent: bool = False,
    ) -> AwaitableReceipt:
        """Hands a message over at once; awaiting the answer gives the Receipt or the error.

        The arguments are `send`'s.  While the topic is being found, its messages wait in order;
        if it is not found, they fail.  Raises Overloaded when the buffer is full: `await ready` in
        front of it waits for room.
        """
        target = self.targets.get(topic) or self._early_target(topic)
        if self.outbox.full:
            raise Overloaded(
                f"{self.outbox.used_bytes} bytes wait to be sent: `await ready(topic)` before "
                "`submit`, or use `send`",
                field="buffer_bytes",
                value=self.outbox.used_bytes,
                limit=self.outbox.limit_bytes,
            )
        batch, index = self.intake.offer(
            target,
            body,
            key,
            tag,
            ordering_key,
            properties,
            delay,
            deliver_at,
            delay_level,
            timer_key,
            if_absent,
        )
        return AwaitableReceipt(batch, index)

    async def ready(self, topic: str) -> None:
        """Waits until `submit` has room, and the topic is found.

        Between the messages of a loop it is what lets them leave.  Raises TopicNotFound,
        Unavailable; Timeout if the buffer stays full for `send_timeout_s`; Closed.
        """
        if self._sender is not None and self.outbox.begun != self._begun_before:
            self._begun_before = self.outbox.begun
            await asyncio.sleep(0)  # the links' turn: a caller that never waits would starve them
        await self._ready(topic)

    async def send_many(
        self,
        topic: str,
        messages: Iterable[bytes | Outgoing],
        **options: Unpack[SendOptions],
    ) -> Receipts:
        """Sends many messages and waits for all.  As `duemq.Producer.send_many`."""
        common = Outgoing(b"", **options)
        await self._ready(topic)
        with self.intake.pieces() as pieces:
            for chunk in self.intake.chunks(messages, common):
                target = await self._ready(topic)
                if not self._timer_calls.shards and has_timer_keys(chunk):
                    await self._shards_known()
                self.intake.offer_chunk(target, chunk, common, pieces)
                await asyncio.sleep(0)  # the links' turn
        for batch, _, _ in pieces:
            await until_done(batch)
        return Receipts(pieces).checked()

    async def _shards_known(self) -> None:
        await self._timer_calls_now().ready(self._settings.send_timeout_s)

    def _timer_calls_now(self) -> TimerCalls:
        self._running()
        return self._timer_calls

    async def flush(self) -> None:
        """Waits until all that was handed over before is stored or failed.

        Raises Timeout after `send_timeout_s`.
        """
        await self._flush(self._running(), self._settings.send_timeout_s)

    async def _flush(self, sender: Sender, timeout_s: float) -> None:
        flushes = sender.flush(timeout_s), self._timer_calls.flush(timeout_s)
        for failure in await asyncio.gather(*flushes, return_exceptions=True):
            if failure is not None:
                raise failure

    async def close(self) -> None:
        """Takes nothing more, waits for what is on its way, ends the connections.  Idempotent.

        What is not answered within `close_timeout_s` fails with Closed.  Raises NotAllSent if
        anything submitted was not stored, then or before, and nobody was told, by its receipt or
        `on_error`.
        """
        async with self._closing:  # who comes second waits for the first
            await self._close()

    async def _close(self) -> None:
        if self._closed:
            return
        if self._sender is not None:
            self.outbox.check()
        self._closed = True
        try:
            if self._sender is not None:
                if self._unclosed is not None:
                    self._unclosed.detach()
                self.outbox.close()
                try:
                    await self._flush(self._sender, self._settings.close_timeout_s)
                except Timeout:
                    pass  # each message's receipt says so
                finally:
                    try:
                        await self._timer_calls.close()
                    finally:
                        await self._sender.close()
        finally:
            await self._client.close()
        self._losses.at_the_end()

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            await self.close()
        except NotAllSent:
            if error is None:
                raise
            # The error of the body says more; what was not stored is in the log.

    def _running(self) -> Sender:
        if self._closed:
            raise Closed("the producer is closed")
        if self._sender is None:
            raise Closed("the producer is not started: use `async with` or `await start()`")
        self.outbox.check()
        return self._sender

    async def _open_target(self, topic: str) -> Target:
        return await self._running().open_target(topic)

    def _early_target(self, topic: str) -> Target:
        return self._running().early_target(topic)

    async def _ready(self, topic: str) -> Target:
        """The topic's target, once there is room."""
        target = self.targets.get(topic) or await self._open_target(topic)
        await self._room()
        return target

    async def _room(self) -> None:
        self._running()
        if not (self.outbox.full or self._turns.waiting):
            return
        timeout_s = self._settings.send_timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._turns:
                while self.outbox.full:
                    room = asyncio.Event()
                    if not self.outbox.on_room(room.set):
                        break
                    await room.wait()
        except TimeoutError:
            raise no_room(self.outbox, timeout_s) from None
        self._running()  # or closed meanwhile


def no_room(outbox: Outbox, timeout_s: float) -> Timeout:
    """The buffer stayed full."""
    return Timeout(
        f"{outbox.used_bytes} bytes wait to be sent and none could be in {timeout_s} s",
        field="buffer_bytes",
        value=outbox.used_bytes,
        limit=outbox.limit_bytes,
    )
