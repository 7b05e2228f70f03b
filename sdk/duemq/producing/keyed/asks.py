"""Requests about timers that wait: to cancel them by key, to give them other due times.

Callers share requests; who asks about many gets several.
"""

from __future__ import annotations

import asyncio
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from duemq.errors import DuemqError, Internal, Timeout, TooLarge
from duemq.producing.keyed.calls import TimerCalls
from duemq.producing.keyed.lanes import ShardCall
from duemq.protocol import checks, timer_keys
from duemq.protocol.due import DELAYS_MS, Due
from duemq.transport import retrying, status
from duemq.v1 import timer_pb2
from duemq.v1.message_pb2 import TimerHandle

T = TypeVar("T")

TimerKey = tuple[str, str]
"""(topic, timer_key)."""
Ref = TimerKey | TimerHandle
# Gathered in one go, before others' turn.
SLICE = 1_000


class TimerAsker(ABC):
    """A client that asks about timers."""

    @abstractmethod
    def _timer_calls_now(self) -> TimerCalls:
        """Raises Closed."""


def keys_of(given: object) -> tuple[list[TimerKey], bool]:
    """The keys, and whether it was one and no list of them.  Raises InvalidArgument."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        return [_checked(given)], True
    if not isinstance(given, list | tuple):
        raise _no_key(given)
    return [_checked(each) for each in given], False


def _checked(key: object) -> TimerKey:
    if not isinstance(key, tuple) or len(key) != 2:
        raise _no_key(key)
    topic, timer_key = key
    timer_keys.check_keyed_topic(topic)
    timer_keys.check_timer_key(timer_key)
    return topic, timer_key


def _no_key(given: object) -> DuemqError:
    return checks.wrong("key", given, "a pair (topic, timer_key), or a list of them")


class Part:
    """One caller's timers: a result or an error each."""

    def __init__(self, count: int) -> None:
        self.results: dict[int, Any] = {}
        self.heard = False
        """A request may have been, that nobody answered."""
        self.done = asyncio.Event()
        self._left = count

    def settle(self, index: int, result: Any) -> None:
        """Of one timer."""
        self.results[index] = result
        self._left -= 1
        if not self._left:
            self.done.set()


class Ask(ShardCall):
    """A request that callers share."""

    def __init__(self, shard: int, now: float, deadline: float) -> None:
        super().__init__(shard, now, deadline)
        self.refs: list[Ref] = []
        self._dues: list[Any] = []
        self._asked: list[tuple[Part, int]] = []
        self._told: set[int] = set()

    def add(self, part: Part, index: int, ref: Ref, due: Due | None) -> None:
        """One more timer."""
        self.refs.append(ref)
        self._dues.append(due)
        self._asked.append((part, index))

    def answered(self, shard_name: str, answer: Any) -> None:
        """Tells who waits what is known; as Call's."""
        results = answer.results
        if len(results) != len(self.refs):
            raise Internal(f"{shard_name} answered {len(results)} of {len(self.refs)} timers")
        missing: DuemqError | None = None
        for at, result in enumerate(results):
            if at in self._told:
                continue
            error = status.from_proto(result.error) if result.HasField("error") else None
            if error is not None and getattr(result, "unanswered", False):  # by another shard
                missing = missing or error
            else:
                self._tell(at, error or result)
        if missing is not None:
            raise missing

    def _tell(self, at: int, result: Any) -> None:
        part, index = self._asked[at]
        self._told.add(at)
        part.settle(index, result)

    def failed(self, error: DuemqError, *, asked: bool) -> None:
        """Tells who waits."""
        for at, (part, _) in enumerate(self._asked):
            if at not in self._told:
                part.heard |= asked and not isinstance(error, TooLarge)
                self._tell(at, error)


class CancelCall(Ask):
    """Of keys."""

    method = "Cancel"

    def request(self, request_id: bytes) -> timer_pb2.CancelRequest:
        """As it is sent."""
        request = timer_pb2.CancelRequest(request_id=request_id)
        for topic, key in self.refs:  # type: ignore[misc]  # they are all keys
            request.keys.add(topic=topic, key=key)
        return request


class RescheduleCall(Ask):
    """Of keys and handles; without due times they are sent now."""

    method = "Reschedule"

    def request(self, request_id: bytes) -> timer_pb2.RescheduleRequest:
        """As it is sent."""
        refs = map(_ref, self.refs)
        request = timer_pb2.RescheduleRequest(request_id=request_id, timers=refs, partial=True)
        if self._dues[0] is None:
            request.fire_now = True
        else:
            dues = request.delays_ms if self._dues[0].field == DELAYS_MS else request.due_ms
            dues.extend(due.value for due in self._dues)
        return request


def _ref(ref: Ref) -> timer_pb2.TimerRef:
    if isinstance(ref, TimerHandle):
        return timer_pb2.TimerRef(handle=ref)
    return timer_pb2.TimerRef(key=timer_pb2.TimerKey(topic=ref[0], key=ref[1]))


async def ask(
    calls: TimerCalls,
    kind: type[Ask],
    read: Callable[[Any], T],
    refs: Sequence[Ref],
    due: Due | None = None,
) -> list[T]:
    """A result of the shard for each, as `read` reads it.

    Raises DuemqErrors: of the first that has one.  What a shard says will do later is asked again
    until `request_timeout_s`; what is TooLarge with fewer others.
    """
    timeout_s = calls.timeout_s
    deadline = time.monotonic() + timeout_s
    away_s = calls.client.settings.away_timeout_s
    shards = await calls.ready(min(timeout_s, away_s))
    results: dict[int, T] = {}
    errors: dict[int, DuemqError] = {}

    async def attempt(left_s: float) -> None:
        errors.clear()
        heard, most = False, SLICE
        while pending := [p for p in enumerate(refs) if p[0] not in results and p[0] not in errors]:
            part = Part(len(pending))
            begins = [partial(kind, shard, time.monotonic(), deadline) for shard in range(shards)]
            for start in range(0, len(pending), most):
                if start:
                    await asyncio.sleep(0)
                way = kind, due and due.field, most < SLICE and (part, start)
                _gather(calls, begins, way, part, due, pending[start : start + most])
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await part.done.wait()
            except TimeoutError:
                raise Timeout(
                    f"no answer within {left_s:g} s: what became of the timers is unknown",
                    retryable=False,
                ) from None
            finally:
                for index, result in part.results.items():
                    if not isinstance(result, DuemqError):
                        results[index] = read(result)
                    elif not isinstance(result, TooLarge) or most == 1:
                        errors[index] = result
            heard |= part.heard
            most = min(most, len(pending)) // 8 or 1
        if errors and not heard and all(error.retryable for error in errors.values()):
            raise errors[min(errors)]

    try:
        await retrying.until(deadline, attempt, away_s)
        if errors:
            raise errors[min(errors)]
    except DuemqError as error:
        raise with_answers(error, results) from error
    return [results[index] for index in range(len(refs))]


def with_answers(error: DuemqError, answers: Mapping[int, Any]) -> DuemqError:
    """It, and what was answered of one caller's list."""
    mine = copy.copy(error)  # others may have asked in the same request
    mine.answers = answers
    return mine


def _gather(
    calls: TimerCalls,
    begins: Sequence[Callable[[], Ask]],
    way: tuple[object, ...],
    part: Part,
    due: Due | None,
    timers: Sequence[tuple[int, Ref]],
) -> None:
    """Puts timers, (index in the caller's list, which one), into the requests to their shards.

    What needs other rights goes apart: a request is refused as a whole.
    """
    now = time.monotonic()
    with calls.lock:
        for index, ref in timers:
            name: tuple[object, ...]
            topic = None
            if isinstance(ref, TimerHandle):
                shard = timer_keys.shard_of_queue(ref.queue_id, len(begins))
                name = ref.store_id, ref.queue_id, ref.offset
            else:
                shard, name = timer_keys.shard_of(*ref, len(begins)), ref
                topic = ref[0]
            call, _ = calls.gather((*way, shard, topic), name, now, begins[shard])
            call.add(part, index, ref, due)
    calls.run()
