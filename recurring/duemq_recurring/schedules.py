"""The schedules of a shard.  Pure.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler, by `take_away`, `apply` and
`left` only, so that it is a function of checkpoint and log.

Of each schedule that is neither paused nor at its end a message waits, as a timer of the shard's
own; when it leaves (`left`: it was dispatched, or cancelled) the schedule is ready for its next
one.  So what cannot be delivered does not pile up: one message of a schedule waits, or as many as
were missed, up to AT_ONCE.

What is missed is told by the catch-up policy, whatever was away: this service, the topic, the clock
that was set, or the schedule itself that was paused.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from duemq.errors import Overloaded, ScheduleNotFound
from duemq_recurring.occurrences import CatchUp
from duemq_recurring.schedule import (
    DELETED,
    MADE,
    MOVED,
    PendingMessage,
    Plan,
    Schedule,
    ScheduleChange,
    Source,
    size_of,
)
from duemq_recurring.steps import AT_ONCE, NEVER

PATIENCE_MS = 1_000
"""So long after its due time a message that still waits is looked at."""
SCHEDULES_MAX = 10_000
"""Of a shard, unless it is set otherwise; and of `BYTES_MAX` in memory."""
BYTES_MAX = 32 << 20
STALE = 4
"""Of so many wake-ups all but one may be void."""

Place = tuple[Source, int]


class Schedules:
    """See the module."""

    def __init__(self) -> None:
        self.on_sooner: Callable[[], None] = lambda: None
        """Called when `next_ms` may have become sooner."""
        self.bytes = 0  # in memory, about
        self._by_name: dict[str, Schedule] = {}
        self._by_place: dict[Place, Schedule] = {}
        self._sources: dict[Source, int] = {}  # how many wait of each
        self._ready: dict[str, None] = {}
        self._wakes: list[tuple[int, str]] = []  # a heap; may have what is no longer true

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Schedule | None:
        """The schedule of a name."""
        return self._by_name.get(name)

    def known(self, name: str) -> Schedule:
        """As `get`.  Raises ScheduleNotFound."""
        schedule = self._by_name.get(name)
        if schedule is None:
            raise ScheduleNotFound(f"there is no schedule {name!r}", field="name", value=name)
        return schedule

    def check_room(self, name: str, plan: Plan, count_max: int, bytes_max: int) -> None:
        """Raises Overloaded if there is no room for one more, or for what this one becomes."""
        old = self.get(name)
        if old is None and len(self) >= count_max:
            raise Overloaded(
                f"schedules_max: this shard has {len(self)} schedules, no more are allowed",
                field="schedules_max",
                value=len(self),
                limit=count_max,
                retryable=False,
            )
        size = self.bytes + size_of(name, plan) - (old.size if old is not None else 0)
        if size > bytes_max:
            raise Overloaded(
                f"schedule_bytes_max: this shard's schedules would take {size} bytes,"
                f" {bytes_max} are allowed",
                field="schedule_bytes_max",
                value=size,
                limit=bytes_max,
                retryable=False,
            )

    def waits_from(self, source: Source) -> bool:
        """Whether a message of a schedule waits that is of this source."""
        return source in self._sources

    def saved(self) -> list[ScheduleChange]:
        """All of them, for a checkpoint."""
        return [change for each in self for change in _saved(each)]

    # -- what happened ----------------------------------------------------

    def take_away(self, gone: Iterable[Place]) -> None:
        """An entry takes these timers away; `apply` follows."""
        self._take_out(gone)

    def apply(self, changes: Iterable[ScheduleChange]) -> None:
        """What an entry says, or a checkpoint."""
        for change in changes:
            schedule = self._by_name.get(change.name)
            if change.what == DELETED:
                if schedule is not None:
                    self._forget(schedule)
                continue
            if change.plan is not None:
                schedule = self._make(change, schedule)
            if schedule is None:
                raise ValueError(f"a schedule that is unknown moved on: {change.name!r}")
            schedule.state = change.state
            self._add(schedule, change.came)
            self._arm(schedule)

    def left(self, source: Source, offsets: Iterable[int]) -> None:
        """Timers of a source are no longer pending: dispatched, cancelled, or lost."""
        if source in self._sources:
            for each, left_ms in self._take_out((source, offset) for offset in offsets):
                each.state = each.state._replace(left_ms=max(left_ms, each.state.left_ms))
                self._arm(each)

    def _make(self, change: ScheduleChange, old: Schedule | None) -> Schedule:
        assert change.plan is not None
        if old is not None:
            self.bytes -= old.size
        pending = old.pending if old is not None else ()
        made = Schedule(change.name, change.plan, change.state, pending)
        for each in pending:
            self._by_place[each.source, each.offset] = made
        self._by_name[change.name] = made
        self.bytes += made.size
        return made

    def _forget(self, schedule: Schedule) -> None:
        self._take_out([(each.source, each.offset) for each in schedule.pending])
        del self._by_name[schedule.name]
        self._ready.pop(schedule.name, None)
        self.bytes -= schedule.size

    def _add(self, schedule: Schedule, came: Sequence[PendingMessage]) -> None:
        schedule.pending += tuple(came)
        for each in came:
            self._by_place[each.source, each.offset] = schedule
            self._sources[each.source] = self._sources.get(each.source, 0) + 1

    def _take_out(self, places: Iterable[Place]) -> list[tuple[Schedule, int]]:
        """The schedules of these timers, each with the last time that one of them was to be."""
        found: dict[str, tuple[Schedule, int]] = {}
        for place in places:
            schedule = self._by_place.pop(place, None)
            if schedule is None:
                continue
            [out] = [each for each in schedule.pending if (each.source, each.offset) == place]
            schedule.pending = tuple(each for each in schedule.pending if each is not out)
            found[schedule.name] = schedule, max(out.at_ms, found.get(schedule.name, (0, 0))[1])
            self._sources[out.source] -= 1
            if not self._sources[out.source]:
                del self._sources[out.source]
        return list(found.values())

    # -- what to do -------------------------------------------------------

    def next_ms(self) -> int:
        """When `due` may have something; 0: now; NEVER: not before something happens."""
        return 0 if self._ready else self._next_wake_ms()

    def due(self, now_ms: int, count: int) -> list[Schedule]:
        """Up to so many that may have to move on.  Each must be moved on, kept or put back."""
        names = list(itertools.islice(self._ready, count))
        for name in names:
            del self._ready[name]
        schedules = [self._by_name[name] for name in names]
        while len(schedules) < count and self._next_wake_ms() <= now_ms:
            _, name = heapq.heappop(self._wakes)
            schedules.append(self._by_name[name])
            schedules[-1].wake_ms = 0
        return schedules

    def _next_wake_ms(self) -> int:
        while self._wakes:
            wake_ms, name = self._wakes[0]
            schedule = self._by_name.get(name)
            if schedule is not None and schedule.wake_ms == wake_ms:
                return wake_ms
            heapq.heappop(self._wakes)
        return NEVER

    def put_back(self, schedules: Iterable[Schedule]) -> None:
        """These could not be moved on: they are due again, whatever time they were kept until."""
        for each in schedules:
            each.wake_ms = 0
            self._ready[each.name] = None

    def keep(self, schedule: Schedule, wake_ms: int) -> None:
        """It need not move on before `wake_ms`."""
        schedule.wake_ms = wake_ms
        if wake_ms == NEVER:
            return
        heapq.heappush(self._wakes, (wake_ms, schedule.name))
        if len(self._wakes) > STALE * len(self._by_name) + AT_ONCE:
            live = {(each.wake_ms, each.name) for each in self if 0 < each.wake_ms < NEVER}
            self._wakes = list(live)
            heapq.heapify(self._wakes)

    def _arm(self, schedule: Schedule) -> None:
        self._ready.pop(schedule.name, None)
        schedule.wake_ms = 0
        if schedule.state.paused:
            return
        if not schedule.pending:
            if not schedule.ended:
                self._ready[schedule.name] = None
                self.on_sooner()
        elif schedule.catch_up(schedule.pending[0].at_ms) is not CatchUp.ALL:
            self.keep(schedule, schedule.pending[-1].due_ms + PATIENCE_MS)
            if self._wakes[0] == (schedule.wake_ms, schedule.name):
                self.on_sooner()


def _saved(schedule: Schedule) -> Iterator[ScheduleChange]:
    """Older releases know nothing that is left out, and read the rest."""
    name, state = schedule.name, schedule.state
    known = state._replace(left_out=(), all_until_ms=0)
    yield ScheduleChange(name, MADE, known, schedule.pending, schedule.plan)
    if state != known:
        yield ScheduleChange(name, MOVED, state)
