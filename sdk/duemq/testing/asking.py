"""What the admin client asks timer shards, of the twin: the real questions, answered at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import grpc.aio

from duemq.administering.asking import Method
from duemq.administering.schedules import Schedules
from duemq.administering.timers import Timers
from duemq.errors import MissingBroker
from duemq.protocol.route import TimerShard
from duemq.testing import waiting
from duemq.testing.broker import MemoryBroker
from duemq.testing.logs import NAME
from duemq.transport.cluster_client import Client
from duemq.v1 import timer_inspector_pb2

if TYPE_CHECKING:
    from duemq_recurring.in_memory import MemorySchedules

P = ParamSpec("P")
T = TypeVar("T")

_SHARD = TimerShard(NAME, NAME, shard=0, shards=1)


class ShardQuestions(Schedules, Timers):
    """Part of the admin client, which asks a memory broker."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(Client(NAME))
        self._broker = broker
        self._channel = cast(grpc.aio.Channel, _MemoryChannel(broker))

    def _now_ms(self) -> int:
        return self._broker.now_ms

    async def _shards_known(self) -> int:
        return 1

    def _shards(self) -> Sequence[TimerShard]:
        return [_SHARD]

    async def _lost(self, alive: Sequence[TimerShard]) -> list[MissingBroker]:
        return []

    async def _together(self, asked: Iterable[Awaitable[T]]) -> list[T]:
        return [await each for each in asked]

    async def _at_shard(self, shard: int, method: Method[T]) -> T:
        return await method(self._channel, 0)

    async def _ask_or_miss(
        self,
        shard: TimerShard,
        method: Method[T],
        missing: list[MissingBroker],
        timeout_s: float = 0,
    ) -> T | None:
        return await method(self._channel, 0)


class _MemoryChannel:
    """Where a stub's requests go."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._made: MemorySchedules | None = None

    def unary_unary(self, path: str, **_: object) -> Callable[..., Awaitable[Any]]:
        return functools.partial(self._answer, path.rpartition("/")[2])

    async def _answer(self, name: str, request: Any, **_: object) -> Any:
        if name == "GetHistogram":
            return self._histogram(request)
        answer: Callable[[Any], Any] = getattr(self._schedules(), name)
        self._broker.fire()  # what was cancelled has a successor
        try:
            return answer(request)
        finally:
            self._broker.fire()

    def _histogram(
        self, request: timer_inspector_pb2.GetHistogramRequest
    ) -> timer_inspector_pb2.TimerHistogram:
        buckets = [
            timer_inspector_pb2.TimerBucket(
                from_ms=each.from_ms, to_ms=each.to_ms, pending=each.pending
            )
            for each in waiting.histogram(self._broker, request.topic or None)
        ]
        return timer_inspector_pb2.TimerHistogram(now_ms=self._broker.now_ms, buckets=buckets)

    def _schedules(self) -> MemorySchedules:
        if self._made is None:
            try:
                from duemq_recurring.in_memory import MemorySchedules
            except ModuleNotFoundError as error:
                raise ImportError(
                    f"schedules in duemq.testing need the module {error.name}:"
                    " pip install 'duemq[testing]'"
                ) from error
            self._made = self._broker.repeating = MemorySchedules(self._broker)
        return self._made


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine answers that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        answer: T = done.value
        return answer
    coroutine.close()
    raise RuntimeError("a coroutine of the twin waits")


def _at_once(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The same method, which does not wait."""

    @functools.wraps(method)
    def call(face: ShardFace, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with face._lock:
            return finished(method(face._shard, *args, **kwargs))

    return call


class ShardFace:
    """What a cluster in memory has of the admin client, as it is; none of it waits.

    Schedules need duemq-recurring; without it they raise ImportError, which says how to get it.
    """

    _lock: threading.RLock
    _shard: ShardQuestions

    timer_histogram = _at_once(Timers.timer_histogram)

    put_schedule = _at_once(Schedules.put_schedule)
    schedule = _at_once(Schedules.schedule)
    schedules = _at_once(Schedules.schedules)
    next_occurrences = _at_once(Schedules.next_occurrences)
    pause_schedule = _at_once(Schedules.pause_schedule)
    resume_schedule = _at_once(Schedules.resume_schedule)
    delete_schedule = _at_once(Schedules.delete_schedule)
