"""The twin's producers: the real ones, with a memory broker where the connections would be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Self, TypeVar, cast

from duemq import aio
from duemq.errors import Closed, DuemqError, TopicNotFound
from duemq.producing.batch import Batch
from duemq.producing.blocking import Producer
from duemq.producing.cancels import CancelOutcome, Handles
from duemq.producing.intake import Intake
from duemq.producing.keyed.asks import Ref, TimerKey
from duemq.producing.keyed.calls import TimerCalls
from duemq.producing.keyed.intake import KeyedIntake
from duemq.producing.outbox import Outbox, Target
from duemq.producing.receipt import PendingReceipt
from duemq.producing.rescheduling import FireOutcome, Rescheduled
from duemq.protocol.due import Due
from duemq.protocol.names import check_sent_to
from duemq.protocol.route import Queue
from duemq.settings import ProducerSettings
from duemq.testing.asking import finished
from duemq.testing.broker import MemoryBroker
from duemq.testing.logs import NAME
from duemq.tracing import spans
from duemq.transport.cluster_client import Client
from duemq.transport.loop_thread import Hosted, LoopThread, refuse_inside

T = TypeVar("T")


class _Targets(dict[str, Target]):
    """By topic.  One that was deleted, or made anew, since is looked for again."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__()
        self._broker = broker

    def get(self, topic: str, default: Any = None) -> Any:
        found = super().get(topic)
        if found is None or len(found.queues) != len(self._broker.queues_of(topic)):
            return default
        return found


class MemoryCalls(TimerCalls):
    """Requests to the one timer shard, answered as soon as they are made."""

    def __init__(self, client: Client, broker: MemoryBroker, lock: threading.RLock) -> None:
        super().__init__(client)
        self._broker = broker
        self._broker_lock = lock  # guards the broker

    @property
    def shards(self) -> int:
        """One."""
        return 1

    async def ready(self, timeout_s: float) -> int:
        """It is known at once."""
        return self.shards

    def wake(self) -> None:
        """In the caller's thread."""
        self.run()

    def run(self) -> None:
        """Stores what was gathered, also what waited for a call of another thread meanwhile."""
        with self.lock:
            taken = self.lanes.take()
        while taken:
            call = taken.pop(0)
            try:
                with self._broker_lock:
                    answer = self._broker.schedule_keyed(call.request(b""))
            except DuemqError as error:
                call.failed(error, asked=True)
            else:
                call.answered(NAME, answer)
            call.done = True
            with self.lock:
                self.lanes.ended(call)
                taken += self.lanes.take()


class AioMemoryProducer(aio.Producer):
    """`duemq.aio.Producer` over a memory broker.  None of its coroutines waits."""

    def __init__(self, broker: MemoryBroker, lock: threading.RLock, **options: Any) -> None:
        super().__init__(NAME, **options)
        self._broker = broker
        self._lock = lock  # guards the broker
        self.told_by: _AtOnce | None = None
        self.targets = _Targets(broker)
        settings = self._settings
        self.outbox = Outbox(settings.buffer_bytes, settings.frame_bytes, self._store_arrivals)
        self._timer_calls = MemoryCalls(self._client, broker, lock)
        keyed = KeyedIntake(self.outbox, self._timer_calls, self, settings.send_timeout_s)
        self.intake = Intake(self.outbox, keyed)

    async def start(self) -> None:
        """There is nothing to connect to."""
        self._sender = cast(Any, self)

    async def flush(self) -> None:
        """What was handed over is stored already, or has failed."""
        self._running()
        self._broker.tell()

    async def close(self) -> None:
        """Takes nothing more.  Raises NotAllSent as `duemq.aio.Producer`."""
        if not self._closed:
            self._closed = True
            self.outbox.close()
            self._broker.tell()
            self._losses.at_the_end()

    async def _cancel(self, handles: Handles) -> list[CancelOutcome]:
        self._running()
        with self._lock:
            return self._broker.cancel(handles)

    async def _cancel_keys(self, keys: Sequence[TimerKey]) -> list[CancelOutcome]:
        self._running()
        with self._lock:
            return self._broker.cancel_keys(keys)

    async def _reschedule(self, refs: Sequence[Ref], due: Due) -> list[Rescheduled]:
        self._running()
        with self._lock:
            return self._broker.reschedule(refs, due)

    async def _fire(self, refs: Sequence[Ref]) -> list[FireOutcome]:
        self._running()
        with self._lock:
            return self._broker.fire_now(refs)

    def early_target(self, topic: str) -> Target:
        """As Sender."""
        try:
            return self._find(topic)
        except TopicNotFound:
            return Target(topic, (), traced=False, found=False)  # its receipts say so

    async def open_target(self, topic: str, timeout_s: float = 0) -> Target:
        """As Sender."""
        return self._find(topic)

    def settled(self, batch: Batch) -> None:
        """As Sender."""
        batch.wake()
        self._ended(batch)

    def _find(self, topic: str) -> Target:
        check_sent_to(topic)
        with self._lock:
            if self._settings.create_topics:
                self._broker.create_topic(topic)
            queues = tuple(Queue(q.broker, q.queue_id) for q in self._broker.queues_of(topic))
        if not queues:
            raise TopicNotFound(f"no broker serves topic {topic!r}", field="topic", value=topic)
        target = self.targets[topic] = Target(topic, queues, spans.traced(topic))
        return target

    def _store_arrivals(self) -> None:
        with self._lock:
            for batch in self.outbox.take_arrivals():
                self.outbox.seal(batch)
                self.outbox.release(batch.size)
                self._broker.send(batch)
                self._ended(batch)

    def _ended(self, batch: Batch) -> None:
        if batch.error is None:
            return
        add = partial(self._losses.add, batch, batch.error, logged=False)
        self._broker.untold.append(partial(self.told_by.call, add) if self.told_by else add)
        if not self._blocking:
            asyncio.get_running_loop().call_soon(self._broker.tell)


class MemoryProducer(Producer):
    """`duemq.Producer` over a memory broker."""

    _hosted: _AtOnce

    def __init__(
        self,
        broker: MemoryBroker,
        lock: threading.RLock,
        on_error: Any,
        settings: ProducerSettings | None,
    ) -> None:
        core = AioMemoryProducer(broker, lock, settings=settings)
        core._serve_blocking(on_error)
        self._settings = core._settings
        self._hosted = hosted = _AtOnce(core, "the producer")
        core.told_by = hosted if on_error else None
        hosted.start()
        self._core = core
        self._outbox = core.outbox
        self._offer = core.intake.offer
        self._targets = core.targets

    def submit(self, *args: Any, **options: Any) -> PendingReceipt:
        """As `duemq.Producer.submit`."""
        return _Receipt(super().submit(*args, **options), self._hosted)


class _Receipt(PendingReceipt):
    def __init__(self, pending: PendingReceipt, hosted: _AtOnce) -> None:
        super().__init__(pending._batch, pending._index)
        self._hosted = hosted

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        self._hosted.call(super().add_done_callback, callback)


class _AtOnce(Hosted):
    """Runs a client whose coroutines never wait, in the caller's thread."""

    def start(self) -> None:
        self.run(self.client.start())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self.closed:
            coroutine.close()
            raise Closed(f"{self._name} is closed")
        try:
            refuse_inside()
        except BaseException:
            coroutine.close()
            raise
        return finished(coroutine)

    def close(self) -> None:
        if not self.closed:
            refuse_inside()
            try:
                self.run(self.client.close())
            finally:
                self.closed = True
                if self._thread is not None:
                    self._thread.release()

    def call(self, function: Callable[..., object], *given: object) -> None:
        """Where clients call back, so that blocking calls are refused in there."""

        async def called() -> None:
            function(*given)

        thread = self._thread
        if self.closed or (thread is not None and thread.inside):
            function(*given)
            return
        if thread is None:
            thread = self._thread = LoopThread.acquire()
        thread.run(called())
