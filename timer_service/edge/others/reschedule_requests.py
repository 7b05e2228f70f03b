"""Reschedule: from protobuf to one call of this shard, and of others that have some of the timers.

What other shards have is passed on once this one has written down, with its own part, that it is
theirs.  So a repeat passes on the same, whatever arrived at them meanwhile; and each of them gets
its part in one piece, by the request's id.  What nobody can say where it is does not arrive any
more, for this request: so that is written down, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc.aio

from duemq.errors import DuemqError, Unavailable
from duemq.protocol import checks
from duemq.protocol.timer_keys import SCHEDULE_RECORDS_MAX
from duemq.transport import status
from duemq.v1 import stubs, timer_pb2
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.cancel_requests import check_request_id
from duemq_server.timer_service.edge.others.other_shards import (
    PASSED_ON_TIMEOUT_S,
    ByShard,
    OtherShards,
    time_for,
)
from duemq_server.timer_service.edge.schedule_requests import dues_of
from duemq_server.timer_service.edge.timer_names import TimerNames, handle_of, proto_of
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.keyed import (
    UNKNOWN,
    Handle,
    RescheduleResult,
    TimerKey,
)
from duemq_server.timer_service.timers.keyed_entry import RequestKey

Named = Handle | TimerKey | DuemqError
_OUTCOMES = {
    "RESCHEDULED": timer_pb2.RESCHEDULED,
    "FIRED": timer_pb2.RESCHEDULE_FIRED,
    "UNKNOWN": timer_pb2.RESCHEDULE_UNKNOWN,
}


class RescheduleRequests:
    """Of one shard."""

    def __init__(self, shard: Shard, links: BrokerLinks, others: OtherShards) -> None:
        self._shard = shard
        self._links = links
        self._others = others

    async def reschedule(
        self, request: timer_pb2.RescheduleRequest, left_s: Callable[[], float | None]
    ) -> timer_pb2.RescheduleResponse:
        """Raises DuemqErrors, as of the rpc.  `left_s`: how long the caller will wait yet."""
        check_request_id(request.request_id)
        self._links.check_may_serve()
        count = len(request.timers)
        checks.count("timers", count, 1, SCHEDULE_RECORDS_MAX, "in a request")
        dues = self._new_dues(request, count)
        names = TimerNames(self._shard.scheduler, self._links, self._others, left_s())
        elsewhere = await _elsewhere(request, names)
        named, doubts = _named_all(request, names, elsewhere)
        decided = await self._decided(request, named, dues, elsewhere, doubts)
        passed = await self._pass_on(request, dues, _theirs(elsewhere, decided), left_s())
        response = timer_pb2.RescheduleResponse()
        for at, each in enumerate(named):
            if isinstance(each, DuemqError):
                response.results.add(error=status.to_proto(each))
            elif at in passed:
                response.results.append(passed[at])
            elif at in elsewhere.missing and decided[at].outcome == UNKNOWN:
                response.results.append(_unanswered(request, elsewhere.missing[at]))
            else:
                response.results.append(_result(decided[at], doubts.get(at)))
        return response

    async def _decided(
        self,
        request: timer_pb2.RescheduleRequest,
        named: Sequence[Named],
        dues: Sequence[int],
        elsewhere: ByShard,
        doubts: Mapping[int, Unavailable],
    ) -> Mapping[int, RescheduleResult]:
        """This shard's decision, by place; none if all of the timers are others'.

        What nobody had may have come to another shard since, and this one have got the queue behind
        it: so it has not arrived, and is not UNKNOWN.  Raises a doubt if nothing is sure to be
        this shard's: a part may have been passed on before.
        """
        asked = {at: each for at, each in enumerate(named) if not isinstance(each, DuemqError)}
        before = self._shard.scheduler.keyed.requests.find(RequestKey(request.request_id))
        if before is None and not asked.keys() - elsewhere.shards.keys() - doubts.keys():
            for doubt in doubts.values():
                raise doubt
            return {}
        not_yet = {*elsewhere.to_come, *doubts} & asked.keys()
        results = await self._shard.reschedule(
            request.request_id,
            list(asked.values()),
            [dues[at] for at in asked],
            fire=request.fire_now,
            elsewhere={asked[at] for at in elsewhere.shards},
            not_yet={asked[at] for at in not_yet},
        )
        return dict(zip(asked, results, strict=True))

    async def _pass_on(
        self,
        request: timer_pb2.RescheduleRequest,
        dues: Sequence[int],
        theirs: ByShard,
        left_s: float | None,
    ) -> dict[int, timer_pb2.RescheduleResult]:
        """Results of timers that other shards have, by place; each does its part once.

        One that may do it later leaves its timers unanswered: a repeat is answered by all.  What is
        refused for good is told of its timers, for others are done.
        """
        timeout_s = time_for(PASSED_ON_TIMEOUT_S, left_s)

        def ask(to: grpc.aio.Channel, its: list[int]) -> Awaitable[timer_pb2.RescheduleResponse]:
            passed = timer_pb2.RescheduleRequest(
                request_id=request.request_id,
                timers=[request.timers[at] for at in its],
                due_ms=() if request.fire_now else [dues[at] for at in its],
                fire_now=request.fire_now,
            )
            return stubs.TimerStub(to).Reschedule(passed, timeout=timeout_s)

        found: dict[int, timer_pb2.RescheduleResult] = {}
        for each in await self._others.each(theirs, ask):
            if not isinstance(each.answer, DuemqError):
                found |= dict(zip(each.places, each.answer.results, strict=True))
            elif each.answer.retryable:
                found |= dict.fromkeys(each.places, _unanswered(request, each.answer))
            else:
                refused = timer_pb2.RescheduleResult(error=status.to_proto(each.answer))
                found |= dict.fromkeys(each.places, refused)
        return found

    def _new_dues(self, request: timer_pb2.RescheduleRequest, count: int) -> list[int]:
        if not request.fire_now:
            return dues_of(request, count, self._shard.now_ms())
        if request.delays_ms or request.due_ms:
            raise checks.wrong("fire_now", "true", "no delays_ms or due_ms beside it")
        return [self._shard.now_ms()] * count


async def _elsewhere(request: timer_pb2.RescheduleRequest, names: TimerNames) -> ByShard:
    """Which of the timers other shards have, and for whom it cannot be said."""
    given = [each.handle for each in request.timers]
    places = [at for at, handle in enumerate(given) if handle.store_id]
    return await names.elsewhere(given, places)


def _named_all(
    request: timer_pb2.RescheduleRequest, names: TimerNames, elsewhere: ByShard
) -> tuple[list[Named], dict[int, Unavailable]]:
    """The timers as the core names them, and whose of them it cannot be said by now.

    Raises Unavailable for another shard's key: the request came to the wrong one.
    """
    named: list[Named] = []
    doubts = dict(elsewhere.missing)
    for at, timer in enumerate(request.timers):
        which = timer.WhichOneof("ref")
        each: Named = handle_of(timer.handle)
        if which == "key":
            each = names.key(timer.key)
        elif which is None:
            each = checks.wrong("timers", "neither", "a handle or a key")
        elif at not in elsewhere.shards and at not in doubts:
            each = names.handle(timer.handle)
        if isinstance(each, Unavailable):
            if which == "key":
                raise each
            doubts[at], each = each, handle_of(timer.handle)
        named.append(each)
    return named, doubts


def _theirs(elsewhere: ByShard, decided: Mapping[int, RescheduleResult]) -> ByShard:
    """Without what had not arrived anywhere when the request came first: that stays so."""
    shards = {
        at: shard
        for at, shard in elsewhere.shards.items()
        if not decided or decided[at].outcome == UNKNOWN
    }
    return ByShard(shards, {})


def _unanswered(
    request: timer_pb2.RescheduleRequest, error: DuemqError
) -> timer_pb2.RescheduleResult:
    """Raises the error if the caller does not want to know of the others' timers."""
    if not request.partial:
        raise error
    return timer_pb2.RescheduleResult(error=status.to_proto(error), unanswered=True)


def _result(result: RescheduleResult, doubt: Unavailable | None) -> timer_pb2.RescheduleResult:
    if result.error is not None:
        return timer_pb2.RescheduleResult(error=status.to_proto(doubt or result.error))
    return timer_pb2.RescheduleResult(
        outcome=_OUTCOMES[result.outcome],
        handle=proto_of(result.handle) if result.handle is not None else None,
    )
