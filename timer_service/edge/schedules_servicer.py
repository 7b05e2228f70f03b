"""The service Schedules: from protobuf to one call and back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from duemq.protocol import checks, timer_keys
from duemq.v1 import schedule_pb2
from duemq_recurring import specs
from duemq_recurring.schedule import Schedule
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.topic_queues import topic_queues
from duemq_server.timer_service.scheduling.schedules import changes as schedule_changes
from duemq_server.timer_service.shard import Shard

SERVICE = schedule_pb2.DESCRIPTOR.services_by_name["Schedules"]
LISTED_MAX = 1_000
LISTED_BYTES_MAX = 1 << 20
"""Of the messages in an answer, about: the rest is asked for again."""
AT_ONCE = 50  # occurrences found before others have a turn: some 5 ms of work


class SchedulesServicer:
    """See protos/duemq/v1/schedule.proto."""

    def __init__(self, shard: Shard, links: BrokerLinks) -> None:
        self._shard = shard
        self._links = links

    async def PutSchedule(
        self, request: schedule_pb2.PutScheduleRequest, _: Any
    ) -> schedule_pb2.PutScheduleResponse:
        """Makes a schedule, or changes it."""
        name = self._mine(request.name)
        plan = specs.plan_of(request.spec)
        await self._links.check_may_take()
        there = self._shard.scheduler.schedules.get(name)
        if there is None or not there.plan.same(plan):  # else its topic may be gone by now
            await topic_queues(self._links, plan.topic)
        outcome = await self._shard.change(
            lambda scheduler, now_ms: schedule_changes.put(
                scheduler, name, plan, now_ms, if_absent=request.if_absent
            )
        )
        assert outcome is not None
        return schedule_pb2.PutScheduleResponse(
            outcome=specs.OUTCOMES[outcome.what], schedule=self._proto(name)
        )

    async def GetSchedule(
        self, request: schedule_pb2.GetScheduleRequest, _: Any
    ) -> schedule_pb2.Schedule:
        """One by its name."""
        name = self._mine(request.name)
        await self._shard.settled()
        return self._proto(name)

    async def ListSchedules(
        self, request: schedule_pb2.ListSchedulesRequest, _: Any
    ) -> schedule_pb2.ListSchedulesResponse:
        """Those of this shard."""
        self._links.check_may_serve()
        checks.between("count", request.count, 0, LISTED_MAX)
        await self._shard.settled()
        all_of = self._shard.scheduler.schedules
        names = sorted(each.name for each in all_of if each.name > request.after)
        found: list[schedule_pb2.Schedule] = []
        size = 0
        for name in names[: request.count or LISTED_MAX]:
            if size > LISTED_BYTES_MAX:
                break
            found.append(self._proto(name))
            size += found[-1].ByteSize()
        return schedule_pb2.ListSchedulesResponse(schedules=found, more=len(found) < len(names))

    async def NextOccurrences(
        self, request: schedule_pb2.NextOccurrencesRequest, _: Any
    ) -> schedule_pb2.NextOccurrencesResponse:
        """When a schedule is due next."""
        name = self._mine(request.name)
        checks.between("count", request.count, 1, specs.NEXT_MAX)
        await self._shard.settled()
        found = self._found(name).to_come(self._shard.now_ms())
        response = schedule_pb2.NextOccurrencesResponse()
        for number, each in enumerate(itertools.islice(found, request.count), 1):
            response.occurrences.add(at_ms=each.at_ms, due_ms=each.due_ms)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        return response

    async def PauseSchedule(
        self, request: schedule_pb2.PauseScheduleRequest, _: Any
    ) -> schedule_pb2.Schedule:
        """Takes away what waits of it; nothing more comes."""
        return await self._changed(request.name, schedule_changes.pause, makes_room=True)

    async def ResumeSchedule(
        self, request: schedule_pb2.ResumeScheduleRequest, _: Any
    ) -> schedule_pb2.Schedule:
        """It goes on."""
        policy = specs.policy_of(request.catch_up)
        return await self._changed(
            request.name,
            lambda scheduler, name, now_ms: schedule_changes.resume(
                scheduler, name, now_ms, policy
            ),
        )

    async def DeleteSchedule(
        self, request: schedule_pb2.DeleteScheduleRequest, _: Any
    ) -> schedule_pb2.DeleteScheduleResponse:
        """It is gone."""
        name = self._mine(request.name)
        outcome = await self._shard.change(
            lambda scheduler, now_ms: schedule_changes.delete(scheduler, name, now_ms),
            makes_room=True,
        )
        return schedule_pb2.DeleteScheduleResponse(deleted=outcome is not None)

    async def _changed(
        self,
        given: str,
        change: Callable[[Any, str, int], schedule_changes.Outcome | None],
        *,
        makes_room: bool = False,
    ) -> schedule_pb2.Schedule:
        name = self._mine(given)
        await self._shard.change(
            lambda scheduler, now_ms: change(scheduler, name, now_ms), makes_room=makes_room
        )
        return self._proto(name)

    def _mine(self, name: str) -> str:
        """Raises InvalidArgument, Unavailable: it is another shard's, or another service has it."""
        timer_keys.check_schedule_name(name)
        self._links.check_may_serve()
        self._links.place.check_schedule(name)
        return name

    def _found(self, name: str) -> Schedule:
        return self._shard.scheduler.schedules.known(name)

    def _proto(self, name: str) -> schedule_pb2.Schedule:
        return specs.proto_of_schedule(self._found(name))
