"""Cancels, by handle and by key: from protobuf to one call of the shard for each, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc.aio

from duemq.errors import DuemqError, Unavailable
from duemq.protocol import checks
from duemq.protocol.limits import HANDLES_MAX
from duemq.protocol.timer_keys import REQUEST_ID_BYTES, SCHEDULE_RECORDS_MAX
from duemq.transport import status
from duemq.v1 import stubs, timer_pb2
from duemq.v1.message_pb2 import TimerHandle
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.others.other_shards import (
    PASSED_ON_TIMEOUT_S,
    ByShard,
    OtherShards,
    time_for,
)
from duemq_server.timer_service.edge.timer_names import TimerNames
from duemq_server.timer_service.scheduling.cancelling import CANCELLED, FIRED, NOT_YET, UNKNOWN
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.keyed import TimerKey
from duemq_server.timer_service.timers.log_entries import Cancelled

ARRIVAL_TIMEOUT_S = 5.0
# Of the caller's time, half of it at most: to tell him what became of the others.
TELLING_S = 1.0
SLICE = 500  # timers read or answered at once
_RESULTS = {
    outcome: timer_pb2.CancelResult(outcome=outcome) for outcome in (CANCELLED, FIRED, UNKNOWN)
}

Given = TypeVar("Given")
Named = TypeVar("Named")
Outcome = str | DuemqError


def _for_ever() -> None:
    return None


class CancelRequests:
    """Of one shard."""

    def __init__(self, shard: Shard, links: BrokerLinks, others: OtherShards) -> None:
        self._shard = shard
        self._links = links
        self._others = others

    async def cancel(
        self, request: timer_pb2.CancelRequest, left_s: Callable[[], float | None] = _for_ever
    ) -> timer_pb2.CancelResponse:
        """Raises InvalidArgument for what is wrong with all of it; Unavailable, Overloaded.

        `left_s`: how long the caller will wait yet.
        """
        checks.count("handles", len(request.handles), 0, HANDLES_MAX, "in a request")
        checks.count("keys", len(request.keys), 0, SCHEDULE_RECORDS_MAX, "in a request")
        check_request_id(request.request_id, wanted=False)
        names = TimerNames(self._shard.scheduler, self._links, self._others, left_s())
        outcomes: list[Outcome | timer_pb2.CancelResult] = []
        if request.handles:
            outcomes += await self._cancel(request, names, left_s)
        if request.keys:

            async def cancel_keys(keys: Sequence[TimerKey]) -> Sequence[Outcome]:
                return await self._shard.cancel_keys(request.request_id, keys)

            outcomes += await _each(request.keys, names.key, cancel_keys)
        response = timer_pb2.CancelResponse()
        for start in range(0, len(outcomes), SLICE):
            if start:
                await asyncio.sleep(0)
            response.results.extend(map(_result, outcomes[start : start + SLICE]))
        return response

    async def _cancel(
        self,
        request: timer_pb2.CancelRequest,
        names: TimerNames,
        left_s: Callable[[], float | None],
    ) -> Sequence[Outcome | timer_pb2.CancelResult]:
        """By handle, wherever the timers are."""
        handles = request.handles
        told = await self._pass_on(request, await names.elsewhere(handles), left_s)
        here = [at for at in range(len(handles)) if at not in told]
        wait_s = 0.0 if request.do_not_wait else _arrival_s(left_s())
        found = await self._here([handles[at] for at in here], names, wait_s)
        told |= dict(zip(here, found, strict=True))
        unknown = [at for at in here if told[at] == UNKNOWN]
        told |= await self._pass_on(request, await names.moved(handles, unknown), left_s)
        return [told[at] for at in range(len(handles))]

    async def _pass_on(
        self,
        request: timer_pb2.CancelRequest,
        elsewhere: ByShard,
        left_s: Callable[[], float | None],
    ) -> dict[int, Outcome | timer_pb2.CancelResult]:
        """What other shards answer about theirs, by place; who is away may have the `missing`."""
        handles = request.handles
        timeout_s = time_for(PASSED_ON_TIMEOUT_S, left_s())

        def ask(to: grpc.aio.Channel, places: list[int]) -> Awaitable[timer_pb2.CancelResponse]:
            passed = timer_pb2.CancelRequest(
                handles=[handles[at] for at in places], do_not_wait=request.do_not_wait
            )
            return stubs.TimerStub(to).Cancel(passed, timeout=timeout_s)

        told: dict[int, Outcome | timer_pb2.CancelResult] = {**elsewhere.missing}
        for each in await self._others.each(elsewhere, ask):
            if isinstance(each.answer, DuemqError):
                told |= dict.fromkeys(each.places, each.answer)
            else:
                told |= dict(zip(each.places, each.answer.results, strict=True))
        return told

    async def _here(
        self, handles: Sequence[TimerHandle], names: TimerNames, wait_s: float
    ) -> Sequence[Outcome]:
        if not handles:
            return []

        async def cancel(asked: Sequence[Cancelled]) -> Sequence[Outcome]:
            found = await self._shard.cancel(asked, wait_s)
            if NOT_YET not in found:
                return found
            told = zip(asked, found, strict=True)
            return [self._told(handle, outcome, wait_s) for handle, outcome in told]

        return await _each(handles, names.handle, cancel)

    def _told(self, handle: Cancelled, outcome: Outcome, wait_s: float) -> Outcome:
        return told(self._links, handle, outcome, wait_s)


def _arrival_s(left_s: float | None) -> float:
    """How long to wait for what has not arrived, where the caller waits for `left_s` yet."""
    if left_s is None:
        return ARRIVAL_TIMEOUT_S
    return min(ARRIVAL_TIMEOUT_S, max(0.0, left_s / 2, left_s - TELLING_S))


def told(links: BrokerLinks, handle: Cancelled, outcome: Outcome, wait_s: float) -> Outcome:
    """The outcome as it is answered."""
    if outcome != NOT_YET:
        return outcome
    what = f"offset {handle.offset} of %TIMER%/{handle.source.queue_id}"
    reason = links.why_not_arrived(handle.source.store_id)
    return Unavailable(
        f"{what} {reason} (waited {wait_s:g} s)", field="offset", value=handle.offset
    )


async def _each(
    given: Sequence[Given],
    name: Callable[[Given], Named | DuemqError],
    ask: Callable[[Sequence[Named]], Awaitable[Sequence[Outcome]]],
) -> list[Outcome]:
    """Asks the shard about those that may be asked about; the others have their errors."""
    refused: dict[int, DuemqError] = {}
    asked: list[Named] = []
    for at, each in enumerate(given):
        if at and at % SLICE == 0:
            await asyncio.sleep(0)
        named = name(each)
        if isinstance(named, DuemqError):
            refused[at] = named
        else:
            asked.append(named)
    told = iter(await ask(asked) if asked else ())
    return [refused[at] if at in refused else next(told) for at in range(len(given))]


def _result(outcome: Outcome | timer_pb2.CancelResult) -> timer_pb2.CancelResult:
    if isinstance(outcome, timer_pb2.CancelResult):
        return outcome
    if isinstance(outcome, DuemqError):
        return timer_pb2.CancelResult(error=status.to_proto(outcome))
    return _RESULTS[outcome]


def check_request_id(request_id: bytes, *, wanted: bool = True) -> None:
    """Raises InvalidArgument."""
    if len(request_id) != REQUEST_ID_BYTES and (wanted or request_id):
        raise checks.wrong(
            "request_id", f"{len(request_id)} bytes", f"{REQUEST_ID_BYTES} random bytes"
        )
