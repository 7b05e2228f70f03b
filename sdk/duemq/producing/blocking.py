"""The synchronous producer: callers' threads fill the outbox, the thread "duemq-io" empties it."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from traceback import walk_stack
from typing import Any, TypeVar, Unpack

from duemq.errors import DuemqError, NotAllSent
from duemq.message import Outgoing, SendOptions
from duemq.producing import receipt
from duemq.producing.intake import has_timer_keys
from duemq.producing.keyed.intake import KeyedIntake
from duemq.producing.outbox import Outbox, Target
from duemq.producing.producer import Producer as AsyncProducer
from duemq.producing.producer import no_room
from duemq.producing.receipt import PendingReceipt, Receipts
from duemq.protocol.moments import Moment
from duemq.protocol.retry_policy import Delay
from duemq.sent import Receipt
from duemq.settings import Addresses, ProducerSettings
from duemq.transport.loop_thread import Face, Hosted, as_in, blocking, refuse_inside, shut_gate

T = TypeVar("T")

# Modules whose functions hold a lock in callers' threads.
_HOLDERS = {Outbox.__module__, KeyedIntake.__module__}
# The sender fails a message at its deadline; should it not, this much later the caller is told.
GRACE_S = 5.0


class Producer(Face):
    """Sends messages.  Safe to use from many threads; not across fork.

    Messages that wait for the same broker travel together; nothing waits while the way is free.
    Connects when it is made; `close` (or leaving `with`) sends what is left and raises if it could
    not.
    """

    def __init__(
        self,
        nameserver: Addresses | None = None,
        *,
        on_error: Callable[[PendingReceipt, DuemqError], object] | None = None,
        settings: ProducerSettings | None = None,
    ) -> None:
        """`nameserver`: `host:port`, several separated by commas; None: DUEMQ_NAMESERVER's.

        `on_error`: called in the thread "duemq-io", which it must not hold up, for each submitted
        message that is not stored, unless its `result` was waited for before; instead of the error
        of `close`.  Raises Unavailable if none answers in `settings.client.connect_timeout_s`.
        """
        core = AsyncProducer(nameserver, settings=settings)
        self._settings = core._settings
        core._serve_blocking(on_error)
        self._hosted = _Hosted(core, "the producer")
        self._hosted.start()
        self._core = core
        self._outbox = core.outbox
        self._offer = core.intake.offer
        self._targets = core.targets
        _open_producers.add(self)

    def send(self, topic: str, body: bytes, **options: Unpack[SendOptions]) -> Receipt:
        """Sends a message and waits until it is stored durably.

        `key` is for look-up, `tag` for filtering; messages of one `ordering_key` go to one queue,
        in the order sent.  `properties`: text by name.

        At most one of: `delay`, from the broker's clock: seconds, a timedelta, or text as
        `"250ms"`, `"5s"`, `"1h30m"`; `deliver_at`: an aware datetime, epoch milliseconds or RFC
        3339 text; `delay_level`: 1 to the number of the broker's levels.  What is due already is
        delivered at once.

        `timer_key` names a message with `delay` or `deliver_at`: it replaces what waits in its
        topic under that key, or with `if_absent` is refused.  A timer shard keeps it, no broker.

        Raises InvalidArgument or TooLarge, naming field, value and limit; TopicNotFound;
        TimerExists; Timeout after `send_timeout_s`, saying whether the message may have been
        stored; Closed.
        """
        refuse_inside()  # before it is on its way
        check_locks(self._core)
        pending = self.submit(topic, body, **options)
        return pending.result(self._settings.send_timeout_s + GRACE_S)

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
    ) -> PendingReceipt:
        """Hands a message over; `result()` of the answer waits for its Receipt or error.

        The options are `send`'s, written out: a dict for each message would cost.  Blocks only
        while the buffer is full, and raises Timeout if it stays so for `send_timeout_s`.  Not
        asking for the result is fire and forget, to which `flush` and `close` put an end.
        """
        target = self._targets.get(topic)
        if target is None:
            target = self._open(topic)
        if self._outbox.full:
            self._wait_for_room()
        if timer_key is not None:
            self._await_shards()
        batch, index = self._offer(
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
        return PendingReceipt(batch, index)

    def send_many(
        self,
        topic: str,
        messages: Iterable[bytes | Outgoing],
        **options: Unpack[SendOptions],
    ) -> Receipts:
        """Sends many messages and waits for all.

        Bytes take the options of the call, an Outgoing has its own.  Raises NotAllSent when some
        were not stored; it says which.

        A list or tuple is looked through first: of one with a wrong message nothing is sent.  Any
        other iterable is read in bites of about a frame, as fast as the brokers store; what came in
        front of a wrong message is sent.  The error (InvalidArgument, TooLarge) names the message
        by its number.  If the iterable raises, what had been read before may be sent.
        """
        refuse_inside()
        check_locks(self._core)
        common = Outgoing(b"", **options)
        intake = self._core.intake
        with intake.pieces() as pieces:
            for chunk in intake.chunks(messages, common):
                target = self._targets.get(topic) or self._open(topic)
                if not self._core._timer_calls.shards and has_timer_keys(chunk):
                    self._await_shards()
                if self._outbox.full:
                    self._wait_for_room()
                intake.offer_chunk(target, chunk, common, pieces)
        for batch, _, _ in pieces:
            if not batch.done:
                receipt.wait(batch, self._settings.send_timeout_s + GRACE_S)
        return Receipts(pieces).checked()

    cancel = blocking(AsyncProducer.cancel)
    reschedule = blocking(AsyncProducer.reschedule)
    fire = blocking(AsyncProducer.fire)
    flush = blocking(AsyncProducer.flush)

    @as_in(AsyncProducer.close)
    def close(self) -> None:
        try:
            self._hosted.close()
        finally:
            if self._hosted.closed:
                _open_producers.discard(self)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self.close()
        except NotAllSent:
            if error is None:
                raise
            # The error of the body says more; what was not stored is in the log.

    def _open(self, topic: str) -> Target:
        return self._hosted.run(self._core._open_target(topic))

    def _await_shards(self) -> None:
        if not self._core._timer_calls.shards:
            self._hosted.run(self._core._shards_known())

    def _wait_for_room(self) -> None:
        refuse_inside()
        timeout_s = self._settings.send_timeout_s
        deadline = time.monotonic() + timeout_s
        while self._outbox.full:
            gate = shut_gate()
            if not self._outbox.on_room(gate.release):
                return  # or it is closed: whoever adds is told
            if not gate.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise no_room(self._outbox, timeout_s)


class _Hosted(Hosted):
    client: AsyncProducer

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._check()
        except RuntimeError:
            coroutine.close()
            raise
        return super().run(coroutine)

    def close(self) -> None:
        self._check()
        super().close()

    def _check(self) -> None:
        if not self.closed:
            check_locks(self.client)


def check_locks(core: AsyncProducer) -> None:
    """Raises RuntimeError in a signal handler that has interrupted a send: it would wait for it.

    Takes no lock: a signal that comes then would leave it held for ever.
    """
    held = core.outbox.lock.locked() or core._timer_calls.lock.locked()
    names = (frame.f_globals.get("__name__") for frame, _ in walk_stack(sys._getframe()))
    if held and not _HOLDERS.isdisjoint(names):
        raise RuntimeError("a signal came in the middle of a send: raise in its handler")


# Strong: what a producer that nobody holds any more has taken is sent all the same.
_open_producers: set[Producer] = set()


def _orphan_producers() -> None:
    for producer in list(_open_producers):
        producer._outbox.orphan()
        producer._hosted.closed = True
        _open_producers.discard(producer)


os.register_at_fork(after_in_child=_orphan_producers)


@atexit.register
def close_producers() -> None:
    """Sends what is left in producers that nobody closed, in one `close_timeout_s` for all."""
    left = list(_open_producers)
    # What they could not send is in the log: nobody could catch the error.
    with suppress(DuemqError):
        if left:
            left[0]._hosted.run(_close_all([each._core for each in left]))
    for producer in left:
        with suppress(DuemqError):
            producer.close()


async def _close_all(cores: list[AsyncProducer]) -> None:
    await asyncio.gather(*(core.close() for core in cores), return_exceptions=True)
