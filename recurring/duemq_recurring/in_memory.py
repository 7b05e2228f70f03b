"""The service Schedules, kept in memory: what `duemq.testing` has in place of a timer shard.

Not threadsafe.  No clock: time is the keeper's `now_ms`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

from duemq.errors import TopicNotFound
from duemq.protocol import checks
from duemq.v1 import message_pb2, schedule_pb2
from duemq_recurring import moves, specs
from duemq_recurring.moves import Move
from duemq_recurring.occurrences import END_MS
from duemq_recurring.schedule import MADE, PendingMessage, Schedule, ScheduleChange, entry_of
from duemq_recurring.schedules import BYTES_MAX, SCHEDULES_MAX, Schedules
from duemq_recurring.steps import AT_ONCE, ScheduleStep, step


class Keeper(Protocol):
    """Who keeps the messages of schedules until they are due."""

    source: tuple[int, int]
    """Store and queue of their handles."""
    now_ms: int

    def has_topic(self, topic: str) -> bool:
        """Whether messages may be sent there."""

    def keep(self, topic: str, record: message_pb2.Record, due_ms: int) -> int:
        """The message is to be sent then; answers its place.  `left` follows when it is gone."""

    def take_away(self, place: int, *, replaced: bool) -> None:
        """It is not to be sent; another one comes in its place, or it is cancelled."""


class MemorySchedules:
    """Schedules by name.  Its calls are the service's (protos/duemq/v1/schedule.proto)."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._schedules = Schedules()

    # ── as time passes ───────────────────────────────────────────────────────────────

    def next_ms(self) -> int:
        """When `advance` may have something to do; beyond all times: not before `left`."""
        return self._schedules.next_ms()

    def left(self, place: int) -> None:
        """What the keeper kept there was sent, or taken away."""
        self._schedules.left(self._keeper.source, (place,))

    def advance(self) -> bool:
        """Those whose time has come move on; whether one did."""
        moved = False
        while self._schedules.next_ms() <= self._keeper.now_ms:
            for each in self._schedules.due(self._keeper.now_ms, AT_ONCE):
                moved |= self._advance(each)
        return moved

    def _advance(self, schedule: Schedule) -> bool:
        found = step(schedule, self._keeper.now_ms)
        if not isinstance(found, ScheduleStep):
            self._schedules.keep(schedule, found)
            return False
        move = moves.advance(schedule, found)
        if move is None:
            schedule.state = schedule.state._replace(cursor_ms=END_MS)
            return False
        self._commit(move)
        return True

    def _commit(self, move: Move) -> None:
        gone = [*move.cancelled, *move.replaced]
        self._schedules.take_away((each.source, each.offset) for each in gone)
        for each in move.cancelled:
            self._keeper.take_away(each.offset, replaced=False)
        for each in move.replaced:
            self._keeper.take_away(each.offset, replaced=True)
        came = []
        for coming in move.come:
            [record] = message_pb2.RecordBatch.FromString(
                entry_of(move.name, move.plan, coming)
            ).records
            place = self._keeper.keep(move.plan.topic, record, coming.due_ms)
            came.append(PendingMessage(self._keeper.source, place, coming.at_ms, coming.due_ms))
        plan = move.plan if move.what == MADE else None
        self._schedules.apply([ScheduleChange(move.name, move.what, move.state, came, plan)])

    # ── what is asked ────────────────────────────────────────────────────────────────

    def PutSchedule(
        self, request: schedule_pb2.PutScheduleRequest
    ) -> schedule_pb2.PutScheduleResponse:
        """Makes a schedule, or changes it.

        Raises InvalidArgument, TooLarge, TopicNotFound, Overloaded.
        """
        name, plan = request.name, specs.plan_of(request.spec)
        old = self._schedules.get(name)
        outcome = moves.kept(old, plan, if_absent=request.if_absent)
        if outcome != moves.UNCHANGED and not self._keeper.has_topic(plan.topic):
            topic = plan.topic
            raise TopicNotFound(f"no broker serves topic {topic!r}", field="topic", value=topic)
        if outcome is None:
            now_ms = self._keeper.now_ms
            plan = moves.with_beginning(plan, now_ms)
            self._schedules.check_room(name, plan, SCHEDULES_MAX, BYTES_MAX)
            self._commit(moves.put(old, name, plan, now_ms))
            outcome = moves.CREATED if old is None else moves.CHANGED
        return schedule_pb2.PutScheduleResponse(
            outcome=specs.OUTCOMES[outcome], schedule=self._proto(name)
        )

    def GetSchedule(self, request: schedule_pb2.GetScheduleRequest) -> schedule_pb2.Schedule:
        """One by its name.  Raises ScheduleNotFound."""
        return self._proto(request.name)

    def ListSchedules(
        self, request: schedule_pb2.ListSchedulesRequest
    ) -> schedule_pb2.ListSchedulesResponse:
        """Those after a name, up to a count."""
        names = sorted(each.name for each in self._schedules if each.name > request.after)
        listed = names[: request.count or None]
        return schedule_pb2.ListSchedulesResponse(
            schedules=map(self._proto, listed), more=len(listed) < len(names)
        )

    def NextOccurrences(
        self, request: schedule_pb2.NextOccurrencesRequest
    ) -> schedule_pb2.NextOccurrencesResponse:
        """When a schedule is due next.  Raises ScheduleNotFound, InvalidArgument."""
        checks.between("count", request.count, 1, specs.NEXT_MAX)
        found = self._schedules.known(request.name).to_come(self._keeper.now_ms)
        response = schedule_pb2.NextOccurrencesResponse()
        for each in itertools.islice(found, request.count):
            response.occurrences.add(at_ms=each.at_ms, due_ms=each.due_ms)
        return response

    def PauseSchedule(self, request: schedule_pb2.PauseScheduleRequest) -> schedule_pb2.Schedule:
        """Takes away what waits of it.  Raises ScheduleNotFound."""
        return self._changed(request.name, moves.pause)

    def ResumeSchedule(self, request: schedule_pb2.ResumeScheduleRequest) -> schedule_pb2.Schedule:
        """It goes on.  Raises ScheduleNotFound, InvalidArgument."""
        policy, now_ms = specs.policy_of(request.catch_up), self._keeper.now_ms
        return self._changed(request.name, lambda each: moves.resume(each, now_ms, policy))

    def DeleteSchedule(
        self, request: schedule_pb2.DeleteScheduleRequest
    ) -> schedule_pb2.DeleteScheduleResponse:
        """It is gone."""
        schedule = self._schedules.get(request.name)
        if schedule is not None:
            self._commit(moves.delete(schedule))
        return schedule_pb2.DeleteScheduleResponse(deleted=schedule is not None)

    def _changed(
        self, name: str, change: Callable[[Schedule], Move | None]
    ) -> schedule_pb2.Schedule:
        move = change(self._schedules.known(name))
        if move is not None:
            self._commit(move)
        return self._proto(name)

    def _proto(self, name: str) -> schedule_pb2.Schedule:
        return specs.proto_of_schedule(self._schedules.known(name))
