"""The service TimerHolds: from protobuf to one call and back."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from duemq.errors import Corrupt
from duemq.protocol import checks, names, timer_keys
from duemq.protocol.due import DUE_MS_MAX
from duemq.v1 import timer_holds_pb2
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.bulk_requests import request_of
from duemq_server.timer_service.scheduling.bulk.jobs import Which
from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.hold_entry import ALL, DROP_OLDER, NEWEST

log = logging.getLogger(__name__)

SERVICE = timer_holds_pb2.DESCRIPTOR.services_by_name["TimerHolds"]
DROP_S = 2.0
"""How long a request waits until what does not go is dropped."""
COUNT_S = 2.0
"""How long timers under a prefix are counted; beyond it their number is not told."""


class TimerHoldsServicer:
    """See protos/duemq/v1/timer_holds.proto."""

    def __init__(self, shard: Shard, links: BrokerLinks) -> None:
        self._shard = shard
        self._links = links

    async def HoldTimers(
        self, request: timer_holds_pb2.HoldTimersRequest, _: Any
    ) -> timer_holds_pb2.HoldTimersResponse:
        """Keeps timers back."""
        topic, prefix = self._named(request.topic, request.key_prefix)
        if request.dry_run:
            was_held = await self._is_held(topic, prefix)
        else:
            hold = partial(changes.hold, topic=topic, prefix=prefix)
            was_held = not await self._shard.change(hold, makes_room=True)
        pending = await self._pending(topic, prefix, dry_run=request.dry_run)
        return timer_holds_pb2.HoldTimersResponse(pending=pending, was_held=was_held)

    async def ResumeTimers(
        self, request: timer_holds_pb2.ResumeTimersRequest, _: Any
    ) -> timer_holds_pb2.ResumeTimersResponse:
        """Lets them go."""
        topic, prefix = self._named(request.topic, request.key_prefix)
        policy = _policy(request)
        pending = await self._pending(topic, prefix, dry_run=request.dry_run)
        response = timer_holds_pb2.ResumeTimersResponse(pending=pending, done=True)
        there = self._shard.scheduler.holds.get(topic, prefix)
        if request.dry_run:
            response.was_held = await self._is_held(topic, prefix)
        elif policy == ALL:
            resume = partial(changes.resume, topic=topic, prefix=prefix)
            response.was_held = await self._shard.change(resume, makes_room=True)
        else:
            older_ms = request.older_than_ms

            def some(scheduler: Scheduler, now_ms: int) -> bool:
                held = changes.resume_some(scheduler, now_ms, topic, prefix, policy, older_ms)
                self._shard.resuming.start()  # whoever asked may be gone before it is durable
                return held

            response.was_held = await self._shard.change(some, makes_room=True)
            hold = self._shard.scheduler.holds.get(topic, prefix)
            if hold is not None:
                response.done = await self._shard.resuming.wait(hold, DROP_S)
        if there is not None:
            response.dropped = self._shard.resuming.dropped[there.number]
        return response

    async def ListTimerHolds(
        self, request: timer_holds_pb2.ListTimerHoldsRequest, _: Any
    ) -> timer_holds_pb2.ListTimerHoldsResponse:
        """What is kept back."""
        self._links.check_may_serve()
        holds = self._shard.scheduler.holds.saved()
        jobs = self._shard.scheduler.bulk.known if request.jobs else []
        asked = [request_of(each) for each in jobs]
        await self._shard.settled()
        return timer_holds_pb2.ListTimerHoldsResponse(
            holds=[
                timer_holds_pb2.TimerHold(
                    topic=each.topic,
                    key_prefix=each.prefix,
                    since_ms=each.since_ms,
                    resuming=bool(each.policy),
                )
                for each in holds
            ],
            jobs=asked,
        )

    def _named(self, topic: str, prefix: str) -> tuple[str, str]:
        """Raises InvalidArgument, Unavailable."""
        self._links.check_may_serve()
        if prefix:
            timer_keys.check_keyed_topic(topic)
            timer_keys.check_timer_key(prefix, "key_prefix")
        else:
            names.check_topic(topic)
        return topic, prefix

    async def _pending(self, topic: str, prefix: str, *, dry_run: bool) -> int | None:
        """None: it cannot be told, or not in time.  Raises Corrupt, of a dry run."""
        if not prefix:
            return self._shard.inspector.pending_of(topic)
        which = Which(topic, prefix, 0, DUE_MS_MAX + 1, None)
        try:
            return await self._shard.bulk.count(which, COUNT_S)
        except Corrupt as error:
            if dry_run:
                raise
            log.error("timers of %s under %s are not counted: %s", topic, prefix, error)
            return None  # what is asked for can be done all the same

    async def _is_held(self, topic: str, prefix: str) -> bool:
        there = self._shard.scheduler.holds.get(topic, prefix)
        await self._shard.settled()
        return there is not None


_POLICIES = {
    timer_holds_pb2.RESUME_POLICY_UNSPECIFIED: ALL,
    timer_holds_pb2.RESUME_ALL: ALL,
    timer_holds_pb2.RESUME_NEWEST: NEWEST,
    timer_holds_pb2.RESUME_DROP_OLDER_THAN: DROP_OLDER,
}


def _policy(request: timer_holds_pb2.ResumeTimersRequest) -> int:
    """Raises InvalidArgument."""
    policy = _POLICIES.get(request.policy)
    if policy is None:
        raise checks.wrong("policy", request.policy, "one of ResumePolicy")
    latest = DUE_MS_MAX if policy == DROP_OLDER else 0
    checks.between("older_than_ms", request.older_than_ms, 0, latest)
    return policy
