"""What the twin stores, and what waits in it.  Pure; `now_ms` moves only when it is told.

What producers send arrives as the bytes that a broker would get, so that arguments, encoding and
receipts are the real ones.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from duemq.descriptions import ResumePolicy
from duemq.errors import InvalidArgument, TooLarge, TopicNotFound
from duemq.producing import handle
from duemq.producing.batch import Batch
from duemq.producing.batch_encoding import Numbers
from duemq.producing.cancels import CancelOutcome, Handle, decoded_all
from duemq.producing.keyed.asks import Ref, TimerKey
from duemq.producing.rescheduling import FireOutcome, Rescheduled, RescheduleOutcome
from duemq.protocol import checks
from duemq.protocol.balance import MessageQueue
from duemq.protocol.due import DEFAULT_LEVELS, DELAYS_MS, DUE_MS_MAX, Due, parse_levels
from duemq.protocol.names import is_system
from duemq.testing.logs import NAME, MemoryLogs
from duemq.v1 import broker_pb2, timer_pb2
from duemq.v1.message_pb2 import Record, TimerHandle

STORE_ID = 1
LEVELS_MS = parse_levels(DEFAULT_LEVELS)


class Pending(NamedTuple):
    """A message that waits for its time."""

    due_ms: int
    topic: str
    """Where it will be stored: %RETRY%<group> if a group sent it back."""
    message_id: str
    key: str | None
    body: bytes
    handle: str
    """What `cancel` takes."""


class _Timer(NamedTuple):
    due_ms: int
    topic: str
    queue_id: int | None
    record: Record


class Timer(NamedTuple):
    """A message that was, or is, delayed, and what became of it."""

    place: int
    handle: str
    what: _Timer
    outcome: CancelOutcome | None
    """None: it waits."""
    replaced: bool
    """It is cancelled, as another came in its place."""
    held: bool
    """It fell due, and waits for the end of a hold; or did, when it was cancelled."""
    dropped: bool
    """It is cancelled, as its hold ended without it."""


_FIRES = {
    RescheduleOutcome.RESCHEDULED: FireOutcome.FIRED,
    RescheduleOutcome.FIRED: FireOutcome.FIRED_BEFORE,
    RescheduleOutcome.UNKNOWN: FireOutcome.UNKNOWN,
}


class Repeating(Protocol):
    """Messages that repeat: duemq_recurring's MemorySchedules."""

    def next_ms(self) -> int:
        """When it may have something to do."""

    def advance(self) -> bool:
        """Whether there was something to do."""

    def left(self, place: int) -> None:
        """The timer at that place no longer waits."""


class MemoryBroker(MemoryLogs):
    """All that is stored."""

    source = (STORE_ID, 0)

    def __init__(self, now_ms: int, queues: int) -> None:
        super().__init__(now_ms, queues)
        self._timers: list[_Timer] = []  # by their place in %TIMER%; stay when they are done
        self._outcomes: dict[int, CancelOutcome] = {}  # place → what became of it
        self._heap: list[tuple[int, int]] = []  # (due_ms, place); cancelled ones stay in it
        self._keyed: dict[TimerKey, int] = {}  # → place of the last one under the key
        self._replaced: set[int] = set()  # of those that are cancelled: another came for each
        self.kept_back: dict[tuple[str, str], int] = {}
        """Topic and beginning of timer keys, "": all; since when."""
        self._kept: list[int] = []  # places of what fell due and is held
        self._stuck: list[int] = []  # places of what fell due and has no topic any more
        self._dropped: set[int] = set()  # of those that are cancelled: by a resume
        self._cancelled_keys: set[TimerKey] = set()  # nothing came there since
        self.repeating: Repeating | None = None
        self.untold: list[Callable[[], None]] = []
        """What producers tell once callers had the time to ask."""

    def tell(self) -> None:
        """Of what failed, whoever is to hear of it and did not ask."""
        untold, self.untold = self.untold, []
        for tell in untold:
            tell()

    def create_topic(self, topic: str, queues: int | None = None) -> None:
        """If it is missing; what waited for it comes.  Raises InvalidArgument."""
        super().create_topic(topic, queues)
        stuck, self._stuck = self._stuck, []
        for place in stuck:
            heapq.heappush(self._heap, (self._timers[place].due_ms, place))
        if stuck:
            self.fire()

    # ── what producers send ──────────────────────────────────────────────────────────

    def send(self, batch: Batch) -> None:
        """Stores a producer's batch and answers it, as its broker would."""
        self._store(batch)
        batch.wake()

    def _store(self, batch: Batch) -> None:
        wanted = None if batch.queue is None else batch.queue.queue_id
        request = batch.encode(-1 if wanted is None else wanted, Numbers(0, 0, 0))
        [sent] = broker_pb2.SendRequest.FromString(request).batches
        records = list(sent.records.records)
        try:
            self.check(batch.topic, records)
            dues = self.dues_of(sent, len(records))
        except (InvalidArgument, TooLarge, TopicNotFound) as error:
            if batch.leave_out(error):
                self._store(batch)
            else:
                batch.failed(error)
            return
        for record in records:
            record.born_ms = self.now_ms
        if batch.timed:
            first = len(self._timers)
            for record, due_ms in zip(records, dues, strict=True):
                self.schedule(due_ms, batch.topic, wanted, record)
            packed = struct.pack(f"<{len(dues)}q", *dues)
            batch.stored(NAME, STORE_ID, 0, first, self.now_ms, packed)
            self.fire()
            return
        queue_id = self.queue_for(batch.topic, wanted)
        offset = len(self.log(MessageQueue(batch.topic, NAME, queue_id)))
        for record in records:
            self.append(batch.topic, queue_id, record)
        batch.stored(NAME, STORE_ID, queue_id, offset, self.now_ms, b"")

    def dues_of(self, sent: broker_pb2.Batch | timer_pb2.ScheduleRequest, count: int) -> list[int]:
        """When each record is due.  Raises InvalidArgument."""
        levels = sent.delay_levels if isinstance(sent, broker_pb2.Batch) else ()
        for level in levels:
            if level > len(LEVELS_MS):
                raise checks.wrong("delay_levels", level, f"1 to {len(LEVELS_MS)}")
        dues = [self.now_ms + delay for delay in sent.delays_ms] or list(sent.due_ms)
        dues = dues or [self.now_ms + LEVELS_MS[level - 1] for level in levels]
        for due_ms in dues:
            if due_ms > DUE_MS_MAX:
                raise self._too_far(due_ms)
        return dues * count if len(dues) == 1 else dues

    def _too_far(self, due_ms: int) -> InvalidArgument:
        return checks.wrong("delays_ms", due_ms - self.now_ms, f"0 to {DUE_MS_MAX} ms from 1970")

    # ── timers ───────────────────────────────────────────────────────────────────────

    def schedule(self, due_ms: int, topic: str, queue_id: int | None, record: Record) -> int:
        """Stores the record when its time has come (queue None: the next in turn); its place."""
        record.due_ms = due_ms
        place = len(self._timers)
        heapq.heappush(self._heap, (due_ms, place))
        if record.timer_key:
            self._keyed[topic, record.timer_key] = place
            self._cancelled_keys.discard((topic, record.timer_key))
        self._timers.append(_Timer(due_ms, topic, queue_id, record))
        return place

    def keep(self, topic: str, record: Record, due_ms: int) -> int:
        """As `schedule`."""
        return self.schedule(due_ms, topic, None, record)

    def take_away(self, place: int, *, replaced: bool) -> None:
        """It is not stored; it is cancelled, or another one comes in its place."""
        (self._replace if replaced else self._cancel)(place)

    def next_due(self) -> int | None:
        """When the next timer is due, or comes; None: none waits."""
        due_ms = self._next_timer()
        if self.repeating is None:
            return due_ms
        next_ms = self.repeating.next_ms()
        return next_ms if due_ms is None else min(due_ms, next_ms)

    def _next_timer(self) -> int | None:
        while self._heap and self._heap[0][1] in self._outcomes:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def fire(self) -> None:
        """Stores what is due now, in the order of due times."""
        self._fire_due()
        while self.repeating is not None and self.repeating.advance():
            self._fire_due()

    def _fire_due(self) -> None:
        while (due_ms := self._next_timer()) is not None and due_ms <= self.now_ms:
            _, place = heapq.heappop(self._heap)
            timer = self._timers[place]
            if any(self._covers(hold, timer) for hold in self.kept_back):
                self._kept.append(place)
                continue
            if not (self.has_topic(timer.topic) or is_system(timer.topic)):
                self._stuck.append(place)
                continue
            self._leave(place, CancelOutcome.FIRED)
            self.append(timer.topic, self.queue_for(timer.topic, timer.queue_id), timer.record)

    @staticmethod
    def _covers(hold: tuple[str, str], timer: _Timer) -> bool:
        topic, prefix = hold
        return timer.topic == topic and timer.record.timer_key.startswith(prefix)

    def _within(self, hold: tuple[str, str], timer: _Timer) -> bool:
        """Whether a hold of longer keys covers it, too."""
        longer = (each for each in self.kept_back if each[1].startswith(hold[1]))
        return any(self._covers(each, timer) for each in longer)

    def under(self, hold: tuple[str, str]) -> int:
        """How many pending ones a hold is about."""
        places = enumerate(self._timers)
        return sum(place not in self._outcomes and self._covers(hold, x) for place, x in places)

    def resume(self, hold: tuple[str, str], policy: str, older_ms: int) -> tuple[bool, int]:
        """Whether it was held, and how many were dropped."""
        if self.kept_back.pop(hold, None) is None:
            return False, 0
        kept, self._kept = self._kept, []
        backlog = sorted(
            (self._timers[place].due_ms, place)
            for place in kept
            if place not in self._outcomes
            and self._covers(hold, self._timers[place])
            and not self._within(hold, self._timers[place])
        )
        newest = {self._timers[place].record.key: place for _, place in backlog}
        for due_ms, place in backlog:
            key = self._timers[place].record.key
            too_old = policy == ResumePolicy.DROP_OLDER_THAN and due_ms < self.now_ms - older_ms
            older = policy == ResumePolicy.NEWEST and key and newest[key] != place
            if too_old or older:
                self._leave(place, CancelOutcome.CANCELLED)
                self._dropped.add(place)
        for place in kept:
            heapq.heappush(self._heap, (self._timers[place].due_ms, place))
        self.fire()
        return True, len(self._dropped.intersection(kept))

    def cancel(self, given: Sequence[Handle]) -> list[CancelOutcome]:
        """Raises InvalidArgument for what is not a handle, before anything is cancelled."""
        outcomes = [self._cancel(self._place_of(wanted)) for wanted in decoded_all(given)]
        self.fire()  # a schedule's next one comes
        return outcomes

    def cancel_keys(self, keys: Sequence[TimerKey]) -> list[CancelOutcome]:
        """As `cancel`, of what waits under keys, or was the last to wait there."""
        return [self._cancel_key(key) for key in keys]

    def _cancel_key(self, key: TimerKey) -> CancelOutcome:
        outcome = self._cancel(self._waiting_under(key))
        if outcome is CancelOutcome.CANCELLED:
            self._cancelled_keys.add(key)
        return CancelOutcome.CANCELLED if key in self._cancelled_keys else outcome

    def _cancel(self, place: int | None) -> CancelOutcome:
        if place is None:
            return CancelOutcome.UNKNOWN
        if place not in self._outcomes:
            self._leave(place, CancelOutcome.CANCELLED)
        return self._outcomes[place]

    def _place_of(self, wanted: Ref) -> int | None:
        if not isinstance(wanted, TimerHandle):
            return self._waiting_under(wanted)
        place = wanted.offset
        known = wanted.store_id == STORE_ID and 0 <= place < len(self._timers)
        return place if known and self._timers[place].due_ms == wanted.due_ms else None

    def _waiting_under(self, key: TimerKey) -> int | None:
        """Or what fired last."""
        place = self._keyed.get(key)
        gone = place is not None and self._outcomes.get(place) is CancelOutcome.CANCELLED
        return None if gone else place

    def schedule_keyed(self, request: timer_pb2.ScheduleRequest) -> timer_pb2.ScheduleResponse:
        """Answers as a timer shard.  Raises InvalidArgument, TopicNotFound, TooLarge."""
        records = list(request.records.records)
        self.check(request.topic, records)
        dues = self.dues_of(request, len(records))
        answer = timer_pb2.ScheduleResponse(now_ms=self.now_ms)
        queue_id = request.queue_id if request.queue_id >= 0 else None
        for record, due_ms in zip(records, dues, strict=True):
            there = self._waiting_under((request.topic, record.timer_key))
            waits = there is not None and there not in self._outcomes
            result = answer.results.add(outcome=timer_pb2.SCHEDULED)
            if there is not None and waits and request.if_absent:
                result.outcome = timer_pb2.EXISTS
                result.handle.CopyFrom(self._handle(there))
                continue
            record.born_ms = self.now_ms
            place = self.schedule(due_ms, request.topic, queue_id, record)
            result.handle.CopyFrom(self._handle(place))
            if there is not None and waits:
                self._replace(there)
                result.outcome = timer_pb2.REPLACED
                result.replaced.CopyFrom(self._handle(there))
        self.fire()
        return answer

    def reschedule(self, refs: Sequence[Ref], due: Due) -> list[Rescheduled]:
        """Raises InvalidArgument, before anything is rescheduled."""
        due_ms = due.value + (self.now_ms if due.field == DELAYS_MS else 0)
        if due_ms > DUE_MS_MAX:
            raise self._too_far(due_ms)
        answers = [self._reschedule(self._place_of(ref), due_ms) for ref in refs]
        self.fire()
        return answers

    def _reschedule(self, place: int | None, due_ms: int) -> Rescheduled:
        outcome = None if place is None else self._outcomes.get(place)
        if outcome is CancelOutcome.FIRED:
            return Rescheduled(RescheduleOutcome.FIRED)
        if place is None or outcome is not None:
            return Rescheduled(RescheduleOutcome.UNKNOWN)
        text = self._text(self._anew(place, due_ms))
        return Rescheduled(RescheduleOutcome.RESCHEDULED, text, due_ms)

    def shift(self, timer: Timer, by_ms: int) -> None:
        """Makes a pending one due so much later, but not before now; `fire` is the caller's."""
        self._anew(timer.place, min(max(timer.what.due_ms + by_ms, self.now_ms), DUE_MS_MAX))

    def move(self, timer: Timer, topic: str) -> None:
        """Sends a pending one to another topic; `fire` is the caller's."""
        self._anew(timer.place, timer.what.due_ms, topic)

    def _anew(self, place: int, due_ms: int, to_topic: str | None = None) -> int:
        """Another one comes for it; answers its place."""
        self._replace(place)
        _, topic, queue_id, record = self._timers[place]
        return self.schedule(due_ms, to_topic or topic, queue_id, record)

    def _replace(self, place: int) -> None:
        self._leave(place, CancelOutcome.CANCELLED)
        self._replaced.add(place)

    def _leave(self, place: int, outcome: CancelOutcome) -> None:
        self._outcomes[place] = outcome
        if self.repeating is not None:
            self.repeating.left(place)

    def timers(self) -> list[Timer]:
        """All there ever were, by due time."""
        found = [
            Timer(
                place,
                self._text(place),
                each,
                self._outcomes.get(place),
                replaced=place in self._replaced,
                held=place in self._kept,
                dropped=place in self._dropped,
            )
            for place, each in enumerate(self._timers)
        ]
        return sorted(found, key=lambda timer: timer.what.due_ms)

    def fire_now(self, refs: Sequence[Ref]) -> list[FireOutcome]:
        """As it is asked: once, however often."""
        return [self._fire_now(ref) for ref in refs]

    def _fire_now(self, ref: Ref) -> FireOutcome:
        place = self._place_of(ref)
        if place is None:
            return FireOutcome.UNKNOWN
        # What is held may be due already.
        answer = self._reschedule(place, min(self.now_ms, self._timers[place].due_ms))
        self.fire()
        if answer.outcome is RescheduleOutcome.RESCHEDULED:
            self._outcomes[place] = CancelOutcome.FIRED
        return _FIRES[answer.outcome]

    def _handle(self, place: int) -> TimerHandle:
        return TimerHandle(store_id=STORE_ID, offset=place, due_ms=self._timers[place].due_ms)

    def pending(self) -> list[Pending]:
        """What waits, by due time."""
        kept = ((self._timers[place].due_ms, place) for place in (*self._kept, *self._stuck))
        waiting = sorted(each for each in (*self._heap, *kept) if each[1] not in self._outcomes)
        return [self._pending(place) for _, place in waiting]

    def _pending(self, place: int) -> Pending:
        due_ms, topic, _, record = self._timers[place]
        key = record.key or None
        return Pending(due_ms, topic, record.message_id, key, record.body, self._text(place))

    def _text(self, place: int) -> str:
        return handle.text_of(self._handle(place))
