"""Other due times for delayed messages, or none: they wait on under a new handle, or go out now."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, overload

from duemq.producing.cancels import Handle, Handles, refs_of
from duemq.producing.handle import text_of
from duemq.producing.keyed import asks
from duemq.producing.keyed.asks import Ref, TimerAsker, TimerKey
from duemq.protocol import checks
from duemq.protocol.due import Due, due_of
from duemq.protocol.moments import Moment
from duemq.protocol.retry_policy import Delay
from duemq.v1 import timer_pb2


class RescheduleOutcome(enum.StrEnum):
    """What became of a `reschedule`."""

    RESCHEDULED = "rescheduled"
    """It is delivered once, at the new time."""
    FIRED = "fired"
    """Too late: it is delivered or on its way."""
    UNKNOWN = "unknown"
    """Nothing waits there: it is cancelled, replaced, long delivered, or never was."""


class Rescheduled(NamedTuple):
    """The answer to a `reschedule`."""

    outcome: RescheduleOutcome
    handle: str | None = None
    """The new one, if it is rescheduled; a cancel by the old one answers CANCELLED."""
    due_ms: int | None = None
    """When it will be delivered, ms since the epoch."""


class FireOutcome(enum.StrEnum):
    """What became of a `fire`."""

    FIRED = "fired"
    """By this call: it is delivered now."""
    FIRED_BEFORE = "fired_before"
    """It was delivered or on its way already."""
    UNKNOWN = "unknown"
    """Nothing waits there: it is cancelled, replaced, long delivered, or never was."""


_FIRES = {
    timer_pb2.RESCHEDULED: FireOutcome.FIRED,
    timer_pb2.RESCHEDULE_FIRED: FireOutcome.FIRED_BEFORE,
}
_OUTCOMES = {
    timer_pb2.RESCHEDULED: RescheduleOutcome.RESCHEDULED,
    timer_pb2.RESCHEDULE_FIRED: RescheduleOutcome.FIRED,
}


class Rescheduling(TimerAsker):
    """What the asyncio producer and the admin client have in common."""

    @overload
    async def reschedule(  # type: ignore[overload-overlap]
        self, handle: Handle, *, delay: Delay | None = None, deliver_at: Moment | None = None
    ) -> Rescheduled: ...
    @overload
    async def reschedule(
        self, handle: Handles, *, delay: Delay | None = None, deliver_at: Moment | None = None
    ) -> list[Rescheduled]: ...
    @overload
    async def reschedule(
        self, *, key: TimerKey, delay: Delay | None = None, deliver_at: Moment | None = None
    ) -> Rescheduled: ...
    @overload
    async def reschedule(
        self,
        *,
        key: Sequence[TimerKey],
        delay: Delay | None = None,
        deliver_at: Moment | None = None,
    ) -> list[Rescheduled]: ...
    async def reschedule(
        self,
        handle: Handle | Handles | None = None,
        *,
        key: TimerKey | Sequence[TimerKey] | None = None,
        delay: Delay | None = None,
        deliver_at: Moment | None = None,
    ) -> Rescheduled | list[Rescheduled]:
        """Gives delayed messages another due time: by handles or receipts; one, or a list.

        Or by `key`: (topic, timer_key), or a list of such pairs.  `delay` or `deliver_at`: as of
        `send`; a delay counts from now, by the timer shard's clock.

        A message is delivered once, at the old time or at the new one.  Raises InvalidArgument;
        Unavailable when a timer shard cannot be asked in time: it may have done it all the same.
        Of a list the error's `answers` say which were.
        """
        due = due_of(delay, deliver_at, None)
        if due is None:
            raise checks.wrong("delay", None, "delay or deliver_at")
        refs, single = refs_of(handle, key)
        answers = await self._reschedule(refs, due)
        return answers[0] if single else answers

    @overload
    async def fire(self, handle: Handle) -> FireOutcome: ...  # type: ignore[overload-overlap]
    @overload
    async def fire(self, handle: Handles) -> list[FireOutcome]: ...
    @overload
    async def fire(self, *, key: TimerKey) -> FireOutcome: ...
    @overload
    async def fire(self, *, key: Sequence[TimerKey]) -> list[FireOutcome]: ...
    async def fire(
        self,
        handle: Handle | Handles | None = None,
        *,
        key: TimerKey | Sequence[TimerKey] | None = None,
    ) -> FireOutcome | list[FireOutcome]:
        """Delivers delayed messages now, each once: by handles or receipts, or `key` as `cancel`.

        The message that is delivered has the time of this call as its `due_ms`.  From then on a
        cancel by its handle answers FIRED.  May be repeated: then it is FIRED_BEFORE.  Raises
        InvalidArgument; Unavailable when a timer shard cannot be asked in time: it may have fired
        them all the same.  Of a list the error's `answers` say which were.
        """
        refs, single = refs_of(handle, key)
        outcomes = await self._fire(refs)
        return outcomes[0] if single else outcomes

    async def _fire(self, refs: Sequence[Ref]) -> list[FireOutcome]:
        return await asks.ask(self._timer_calls_now(), asks.RescheduleCall, _fired, refs)

    async def _reschedule(self, refs: Sequence[Ref], due: Due) -> list[Rescheduled]:
        calls = self._timer_calls_now()
        return await asks.ask(calls, asks.RescheduleCall, answer_of, refs, due)


def _fired(result: timer_pb2.RescheduleResult) -> FireOutcome:
    return _FIRES.get(result.outcome, FireOutcome.UNKNOWN)


def answer_of(result: timer_pb2.RescheduleResult) -> Rescheduled:
    """As it came from the shard."""
    outcome = _OUTCOMES.get(result.outcome, RescheduleOutcome.UNKNOWN)
    if outcome is not RescheduleOutcome.RESCHEDULED:
        return Rescheduled(outcome)
    return Rescheduled(outcome, text_of(result.handle), result.handle.due_ms)
