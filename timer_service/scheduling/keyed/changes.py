"""Timers come under keys, go, or get other due times: the decisions.

Owned and run by: the thread that owns the scheduler.  No clock, no waiting.

    advance ── known what waits? ── yes ──► decided: one SCHEDULE entry, applied
                    │    ▲
                    no   └── answered ◄── look-up (key_look_up.py) of `asks`
                    └──────────────────────────┘

Between what `look` says and the entry nothing comes in between: so of two requests for a key the
one that is decided later sees what the other did, and the answers are as if one came after the
other.  An entry is whole or nothing: the old timer fires or the new one, whatever crashes when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from duemq.errors import DuemqError, InvalidArgument, TooLarge
from duemq.protocol.limits import BATCH_BYTES_DEFAULT
from duemq_server.storage import record
from duemq_server.timer_service.far.key_look_up import HandleAsk, KeyAsk
from duemq_server.timer_service.scheduling.cancelling import outcome_of_gone, source_of
from duemq_server.timer_service.scheduling.keyed import keyed_state
from duemq_server.timer_service.scheduling.keyed.own_frames import New, frames_of, next_offset
from duemq_server.timer_service.scheduling.keyed.search import HandleSearch, KeySearch, Waiting
from duemq_server.timer_service.timers import keyed_entry, log_entries
from duemq_server.timer_service.timers.keyed import (
    EXISTS,
    FIRED,
    REPLACED,
    RESCHEDULED,
    SCHEDULED,
    UNKNOWN,
    Handle,
    KeyedRecords,
    TimerKey,
)
from duemq_server.timer_service.timers.keyed_entry import (
    CANCELLED,
    NO_REQUEST,
    NOT_YET,
    Changed,
    RequestKey,
    Result,
)
from duemq_server.timer_service.timers.log_entries import TargetId
from duemq_server.timer_service.timers.rows import Hashes

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler

RESCHEDULED_BYTES_MAX = BATCH_BYTES_DEFAULT
"""Of the bodies of one request: they are written anew, in one entry."""
NEVER = 1 << 62


class KeyedChange(ABC):
    """A request that is being decided."""

    def __init__(self, scheduler: Scheduler, request: RequestKey, keys: Sequence[TimerKey]) -> None:
        self.request = request
        self.keys = keys
        self.results: list[Result] = []
        """Once `advance` said True: one each."""
        self.errors: dict[int, DuemqError] = {}
        """Count instead of results, by place."""
        self.end = 0
        """Position up to which the log must be durable before the results are told."""
        self.first_due_ms = NEVER
        """Of what came."""
        self._scheduler = scheduler
        self._search = KeySearch(scheduler, keys)

    @property
    def size(self) -> int:
        """Timers that it is about."""
        return len(self.keys)

    @property
    def _remembered(self) -> RequestKey:
        """What its answer is kept under: who asks again after errors is not told the rest of it."""
        return RequestKey(NO_REQUEST) if self.errors else self.request

    def advance(self, now_ms: int) -> bool:
        """Decides; False: a look-up must be run first.

        Raises LogFull, DiskFull: nothing was done, call again.  Raises Overloaded, Corrupt,
        TooLarge, InvalidArgument: nothing was done, nor will be.
        """
        keyed = self._scheduler.keyed
        answer = keyed.requests.find(self.request)
        if answer is not None:
            self.results = keyed_entry.decode_answer(answer)
            self.end = self._scheduler.log.end_position
            return True
        if not self._look():
            return False
        self._decide(now_ms)
        return True

    def asks(self) -> tuple[list[KeyAsk], list[HandleAsk]]:
        """What to look for, once `advance` said False."""
        return self._search.asks(), []

    def answered(self) -> None:
        """The look-up was run."""
        self._search.answered()

    def _look(self) -> bool:
        return self._search.look()

    @abstractmethod
    def _decide(self, now_ms: int) -> None: ...

    def _commit(
        self,
        now_ms: int,
        results: list[Result],
        come: dict[int, list[New]],
        *,
        cancelled: Sequence[Waiting] = (),
        cancelled_hashes: Hashes = np.empty(0, dtype=np.uint64),  # noqa: B008 (nobody writes it)
        replaced: Sequence[Waiting] = (),
        fired: bool = False,
    ) -> None:
        """Appends the entry and applies it.  `come`: by the number of their target."""
        scheduler, keyed = self._scheduler, self._scheduler.keyed
        rows = np.array([each.row for each in (*cancelled, *replaced)], dtype=np.int32)
        answer = keyed_entry.encode_answer(results)
        if self._remembered.id != NO_REQUEST:
            keyed.requests.make_room(answer, now_ms)
        new = [each for group in come.values() for each in group]
        gone = np.array([each.target for each in (*cancelled, *replaced)], dtype=np.int64)
        changed = Changed(
            self._remembered,
            now_ms,
            [each.handle for each in cancelled],
            cancelled_hashes,
            [each.handle for each in replaced],
            keyed.source,
            [scheduler.numbers.targets[target].broker for target in come],
            np.array([each.timer_key for each in new], dtype=np.uint64),
            frames_of(scheduler, come, now_ms),
            answer,
            topics=scheduler.topics.marks(gone).tolist(),
            fired=fired,
        )
        parts = keyed_entry.encode(changed)
        position, self.end = scheduler.log.append(log_entries.SCHEDULE, parts)
        for each in (*cancelled, *replaced):
            each.forget()
        _uncount(scheduler, [*cancelled, *replaced])
        home = position + record.HEADER_BYTES + len(parts[0])
        topics = [scheduler.numbers.targets[target].topic for target in gone.tolist()]
        keyed_state.apply(scheduler, changed, home, now_ms, rows, topics)
        self.first_due_ms = min((each.due_ms for each in new), default=NEVER)
        self.results = results


class Scheduling(KeyedChange):
    """Records come under their keys; what waits there is replaced, or stays."""

    def __init__(
        self, scheduler: Scheduler, request: RequestKey, records: KeyedRecords, *, if_absent: bool
    ) -> None:
        keys = [TimerKey(records.topic, key) for key in records.keys]
        super().__init__(scheduler, request, keys)
        self._records = records
        self._if_absent = if_absent

    def _decide(self, now_ms: int) -> None:
        if self._search.errors:
            raise next(iter(self._search.errors.values()))
        scheduler, records, waiting = self._scheduler, self._records, self._search.waiting
        target = scheduler.numbers.number_target(
            TargetId(records.broker, records.topic, records.queue_id)
        )
        results: list[Result] = []
        come: list[New] = []
        replaced: list[Waiting] = []
        body, offset = memoryview(records.records), next_offset(scheduler)
        for at, (old, hashed) in enumerate(zip(waiting, self._search.hashes.tolist(), strict=True)):
            record_bytes, body = body[: records.sizes[at]], body[records.sizes[at] :]
            if old is not None and self._if_absent:
                results.append(Result(EXISTS, (old.handle,)))
                continue
            due_ms = records.due_ms[at]
            handle = Handle(scheduler.keyed.source, offset + len(come), due_ms)
            tag_hash, key_hash = records.tag_hashes[at], records.key_hashes[at]
            come.append(New(record_bytes, due_ms, tag_hash, key_hash, hashed))
            if old is None:
                results.append(Result(SCHEDULED, (handle,)))
            else:
                replaced.append(old)
                results.append(Result(REPLACED, (handle, old.handle)))
        self._commit(now_ms, results, {target: come} if come else {}, replaced=replaced)


class CancellingKeys(KeyedChange):
    """What waits under keys goes."""

    def _decide(self, now_ms: int) -> None:
        ended, search = self._scheduler.keyed.ended, self._search
        cancelled: dict[Handle, Waiting] = {}  # once, though a key may be named twice
        hashes: list[int] = []
        results: list[Result] = []
        for found, hashed in zip(search.waiting, search.hashes.tolist(), strict=True):
            if found is not None and found.handle not in cancelled:
                cancelled[found.handle] = found
                hashes.append(hashed)
            outcome = ended.outcome(hashed) or UNKNOWN if found is None else CANCELLED
            results.append(Result(outcome))
        self.errors.update(search.errors)
        if not cancelled and self._remembered.id == NO_REQUEST:
            self.end = self._scheduler.log.end_position
            self.results = results
            return
        self._commit(
            now_ms,
            results,
            {},
            cancelled=list(cancelled.values()),
            cancelled_hashes=np.array(hashes, dtype=np.uint64),
        )


class Rescheduling(KeyedChange):
    """Timers get other due times, and so another place: each goes, and comes anew."""

    def __init__(
        self,
        scheduler: Scheduler,
        request: RequestKey,
        timers: Sequence[Handle | TimerKey],
        due_ms: Sequence[int],
        *,
        fire: bool = False,
        elsewhere: Collection[Handle | TimerKey] = (),
        not_yet: Collection[Handle | TimerKey] = (),
    ) -> None:
        """`fire`: by hand; what was due before its new time keeps its own.

        `elsewhere`: these are other shards', and UNKNOWN here.  `not_yet`: these count as not
        arrived, whatever came meanwhile.
        """
        keys = [each for each in timers if isinstance(each, TimerKey)]
        super().__init__(scheduler, request, keys)
        self._key_at = {key: at for at, key in enumerate(keys)}
        self._handle_at: dict[Handle, int] = {}
        self._timers = timers
        self._due_ms = due_ms
        self._fire = fire
        self._elsewhere = elsewhere
        self._not_yet = not_yet
        self._handles: HandleSearch | None = None
        _check_distinct([(each, at) for at, each in enumerate(timers)])

    @property
    def size(self) -> int:
        """Timers that it is about."""
        return len(self._timers)

    def asks(self) -> tuple[list[KeyAsk], list[HandleAsk]]:
        """As Change's."""
        return self._search.asks(), self._handles.asks() if self._handles else []

    def answered(self) -> None:
        """The look-up was run."""
        super().answered()
        if self._handles is not None:
            self._handles.answered()

    def _look(self) -> bool:
        if self._handles is None:  # what has not arrived by now will not be looked for
            away = {*self._elsewhere, *self._not_yet}
            here = (each for each in self._timers if each not in away)
            handles = [each for each in here if not isinstance(each, TimerKey)]
            arrived = [h for h in handles if source_of(self._scheduler, h) is not None]
            self._handles = HandleSearch(self._scheduler, arrived)
            self._handle_at = {handle: at for at, handle in enumerate(arrived)}
        known = self._handles.look()
        return super()._look() and known

    def _decide(self, now_ms: int) -> None:
        found = self._found()
        results: list[Result] = []
        come: dict[int, list[New]] = {}
        for each, due_ms in zip(self._timers, self._due_ms, strict=True):
            old = found.get(each)
            if old is None:
                results.append(Result(self._outcome_of_gone(each, now_ms)))
                continue
            due_ms = self._new_due_ms(old, due_ms)
            new = New(old.body, due_ms, old.tag_hash, old.key_hash, old.timer_key)
            come.setdefault(old.target, []).append(new)
            results.append(Result(RESCHEDULED, (old.handle,)))  # its own handle follows below
        replaced = list(found.values())
        timers = enumerate(self._timers)
        _check_distinct([(found[each].handle, at) for at, each in timers if each in found])
        size = sum(len(each.body) for each in replaced)
        if size > RESCHEDULED_BYTES_MAX:
            raise TooLarge(
                f"the bodies of these timers have {size} bytes together, at most"
                f" {RESCHEDULED_BYTES_MAX} are written anew at once: name fewer",
                field="timers",
                value=size,
                limit=RESCHEDULED_BYTES_MAX,
            )
        results = self._with_new_handles(results, found, come)
        self._commit(now_ms, results, come, replaced=replaced, fired=self._fire and bool(replaced))

    def _new_due_ms(self, old: Waiting, due_ms: int) -> int:
        return min(old.handle.due_ms, due_ms) if self._fire else due_ms

    def _found(self) -> dict[Handle | TimerKey, Waiting]:
        assert self._handles is not None
        for errors in (self._search.errors, self._handles.errors):
            if errors:
                raise next(iter(errors.values()))
        by_key = zip(self.keys, self._search.waiting, strict=True)
        found: dict[Handle | TimerKey, Waiting] = {k: w for k, w in by_key if w is not None}
        by_handle = zip(self._handles.handles, self._handles.waiting, strict=True)
        found |= {h: w for h, w in by_handle if w is not None and w.handle == h}
        return {each: found[each] for each in self._timers if each in found}

    def _outcome_of_gone(self, each: Handle | TimerKey, now_ms: int) -> str:
        scheduler = self._scheduler
        if isinstance(each, TimerKey):
            hashed = int(self._search.hashes[self._key_at[each]])
            outcome = scheduler.keyed.ended.outcome(hashed)
            return UNKNOWN if outcome in (None, CANCELLED) else str(outcome)
        assert self._handles is not None
        at = self._handle_at.get(each)
        if at is None:
            gone = each in self._elsewhere or scheduler.keyed.is_own(each.source)
            return UNKNOWN if gone else NOT_YET
        number = source_of(scheduler, each)
        assert number is not None
        if self._handles.waiting[at] is not None:
            return UNKNOWN  # another due time
        if scheduler.fires.fired_late(number, each.offset):
            return FIRED
        if scheduler.tombstones.has(number, each.offset):
            return UNKNOWN  # cancelled
        return outcome_of_gone(scheduler, number, each, now_ms)

    def _with_new_handles(
        self,
        results: list[Result],
        found: dict[Handle | TimerKey, Waiting],
        come: dict[int, list[New]],
    ) -> list[Result]:
        """Offsets follow the frames, one a target."""
        offset, next_of = next_offset(self._scheduler), {}
        for target, group in come.items():
            next_of[target] = offset
            offset += len(group)
        made = []
        for each, due_ms, result in zip(self._timers, self._due_ms, results, strict=True):
            if result.outcome == RESCHEDULED:
                target, due_ms = found[each].target, self._new_due_ms(found[each], due_ms)
                handle = Handle(self._scheduler.keyed.source, next_of[target], due_ms)
                next_of[target] += 1
                result = Result(RESCHEDULED, (handle,))
            made.append(result)
        return made


def _check_distinct(timers: Sequence[tuple[Handle | TimerKey, int]]) -> None:
    """Raises InvalidArgument if two of these, with their places, are the same."""
    seen: dict[Handle | TimerKey, int] = {}
    for each, at in timers:
        first = seen.setdefault(each, at)
        if first != at:
            raise InvalidArgument(
                f"timers[{at}] is the same one as timers[{first}]", field="timers", value=at
            )


def _uncount(scheduler: Scheduler, gone: Sequence[Waiting]) -> None:
    """Tells forecasts of those that lie in blocks."""
    far = [(each.block, each) for each in gone if each.block is not None]
    if far:
        slots = scheduler.topics.slots(np.array([each.target for _, each in far]))
        due_ms = np.array([each.handle.due_ms for _, each in far], dtype=np.int64)
        scheduler.due_counts.cancelled([block for block, _ in far], slots, due_ms)
