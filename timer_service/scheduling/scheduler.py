"""The core of a timer shard: which timers it holds, where they lie, and what happens to them.

Owned and mutated by one thread (the event loop).  No clock, no network, no waiting: it takes
`now_ms` and events, appends to the timer log, and says what to do next.  Disk work that takes long
comes out as jobs (housekeeping.py) to be run in a thread.

    frames fetched ──► ADD ──► due soon? ── yes ──► near table, wheel ──► due ──► DISPATCH ──► lane
                                   │                     ▲                                      │
                                   no                    │ load, as the near window moves       ▼
                                   └► memtable ─ flush ► blocks                        broker, ACK

Where timers lie and how they move between memory and disk is tiers.py's, and parking.py's of those
that are due and cannot go; this file has what comes in and what goes out.

Invariants:
 - The log is the truth; memory is a function of checkpoint and log, see recovery.py.
 - A batch is sent only after its DISPATCH entry is durable; since the ADD entry lies before it in
   the same log, no timer is fired that a crash could bring back.
 - accepted = pending + fired + cancelled + replaced + dropped, in all and of each topic, where
   `pending` is what the structures really hold: near + memtable (and the one being flushed) +
   blocks, less cancelled and replaced timers not yet met there.
 - A timer is in exactly one of these places, and something will fire it from there: `check`.  It
   goes back on the picture only when memory is short (evicted, parked) or the clock went back.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from duemq.errors import InvariantError
from duemq_recurring.schedules import Schedules
from duemq_server.storage import record
from duemq_server.storage.disk import Buffer
from duemq_server.timer_service.far.due_counts import DueCounts
from duemq_server.timer_service.far.far_segments import FarSegments
from duemq_server.timer_service.far.numbering import Numbering, Source
from duemq_server.timer_service.far.tombstones import Tombstones
from duemq_server.timer_service.scheduling.bulk.jobs import BulkJobs
from duemq_server.timer_service.scheduling.dispatch import (
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    NEVER,
    Dispatcher,
)
from duemq_server.timer_service.scheduling.fire_lane import (
    FireBatch,
    FireLane,
    FireOutcome,
    make_batch,
)
from duemq_server.timer_service.scheduling.fire_memory import FireMemory
from duemq_server.timer_service.scheduling.holding.holds import Holds, waiting_room
from duemq_server.timer_service.scheduling.keyed.keyed_state import KeyedState
from duemq_server.timer_service.scheduling.ledger import Ledger
from duemq_server.timer_service.scheduling.parking import Parking
from duemq_server.timer_service.scheduling.tiers import Tiers
from duemq_server.timer_service.scheduling.topic_counts import TopicCounts
from duemq_server.timer_service.timers import intake, log_entries
from duemq_server.timer_service.timers.key_hash import key_in
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import Dispatched, Restarted, SourceId, TargetId
from duemq_server.timer_service.timers.near import Near
from duemq_server.timer_service.timers.rows import Blob, Home, Rows
from duemq_server.timer_service.timers.wheel import SPAN_MS, Ids

_log = logging.getLogger(__name__)

SLEEPS_MAX = 2_000  # targets found stuck in one tick
FORGOTTEN_MAX = 500  # lanes forgotten with a checkpoint
ACKS_MAX = 512  # acknowledgements held back for the next entry of the log


class Log(Protocol):
    """What the scheduler needs of a duemq_server.storage.log.SegmentedLog."""

    def append(self, kind: int, parts: Sequence[Buffer]) -> tuple[int, int]: ...  # noqa: D102
    @property
    def end_position(self) -> int: ...  # noqa: D102


class Ingested(NamedTuple):
    """Timers taken over, and when the first of them is due."""

    timers: int
    first_due_ms: int = NEVER


class Scheduler:
    """A shard's timers.  See the module for the picture."""

    def __init__(self, log: Log, segments: FarSegments, limits: Limits, now_ms: int) -> None:
        if not 0 < limits.near_window_ms < SPAN_MS:
            raise InvariantError(f"near_window_ms {limits.near_window_ms} is not below {SPAN_MS}")
        self.log = log
        self.limits = limits
        self.near = Near(now_ms, limits.near_rows_max, limits.near_bytes_max)
        self.segments = segments
        self.holds = Holds()
        self.dispatcher = Dispatcher(self.holds)
        self.tombstones = Tombstones(limits.tombstone_keep_ms, limits.tombstones_max)
        self.fires = FireMemory()
        self.ledger = Ledger()
        self.numbers = Numbering()
        self.topics = TopicCounts(self.numbers)
        self.due_counts = DueCounts()
        self.tiers = Tiers(
            limits, self.near, segments, self.numbers, self.topics, self.tombstones, self.due_counts
        )
        self.parking = Parking(
            limits, self.dispatcher, self.holds, self.numbers, self.near, self.tiers
        )
        self.keyed = KeyedState(limits.requests_max, limits.request_bytes_max)
        self.schedules = Schedules()
        self.bulk = BulkJobs()
        self._undurable: deque[tuple[int, FireBatch]] = deque()
        self._arrivals: deque[tuple[int, Source, int]] = deque()
        self._acks: list[int] = []
        self._random = random.Random(0)  # jitter only
        self._ticked_ms = now_ms  # time of the last tick
        self._resumed: deque[int] = deque()  # targets of holds that are gone

    # -- timers come ------------------------------------------------------

    def ingest(
        self,
        source_id: SourceId,
        broker: str,
        data: bytes,
        now_ms: int,
        fetched_from: int | None = None,
        begin: int = 0,
    ) -> Ingested:
        """Takes fetched frames over; answers what was new.

        What was taken over before is ignored.  `fetched_from`: the offset that the broker was
        asked from; what is not there from it on is lost.  `begin`: what lies before it is another
        shard's.

        Raises Corrupt, OffsetOutOfRange if frames are missing in between, and LogFull or DiskFull
        (then nothing happened).
        """
        fetched = list(intake.frames_in(data))
        source = self.numbers.source(source_id)
        wanted = max(begin, source.next_offset if source is not None else 0)
        fetched = [each for each in fetched if each.frame.end_offset > wanted]
        if not fetched:
            return Ingested(0)
        base = fetched[0].frame.base_offset
        expected = wanted if source is not None and wanted != fetched_from else base
        end_offset = intake.check_whole(fetched, expected, f"{broker}, queue {source_id.queue_id}")
        start = fetched[0].start
        new = memoryview(data)[start:] if start else data
        parts = log_entries.encode_add(source_id, broker, new)
        position, end = self.log.append(log_entries.ADD, parts)
        if source is not None and wanted < base:
            what = "%s, queue %d: the broker has lost the timers at offsets %d to %d"
            _log.error(what, broker, source_id.queue_id, wanted, base - 1)
        home = position + record.HEADER_BYTES + len(parts[0])
        if start:
            fetched = list(intake.frames_in(new))
        ingested = self.apply_add(source_id, broker, fetched, bytes(new), home, now_ms)
        number = self.numbers.number_source(source_id, broker, end_offset)  # known by now
        self._arrivals.append((end, self.numbers.sources[number], end_offset))
        return ingested

    def apply_add(
        self,
        source_id: SourceId,
        broker: str,
        fetched: Sequence[intake.FetchedFrame],
        data: bytes,
        home: int,
        now_ms: int,
    ) -> Ingested:
        """Timers of an ADD entry, whose frames lie at `home` of the log, come into memory."""
        numbers = self.numbers
        base = fetched[0].frame.base_offset
        source = numbers.number_source(source_id, broker, base)
        numbers.sources[source].skip_to(base)
        targets = [
            numbers.number_target(TargetId(broker, each.target_topic, each.target_queue_id))
            for each, _, _ in fetched
        ]
        rows = intake.rows_of(fetched, source, targets)
        numbers.sources[source].broker = broker
        numbers.sources[source].next_offset = fetched[-1].frame.end_offset
        self.ledger.accepted += len(rows)
        for target, (each, _, _) in zip(targets, fetched, strict=True):
            self.topics.of_target(target).accepted += each.count
        accepted_ms = fetched[-1].frame.store_ms
        self.tiers.admit(rows, Blob(data, Home("", home), accepted_ms=accepted_ms), now_ms)
        return Ingested(len(rows), int(rows.due_ms.min()))

    # -- timers are due ---------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Fires what is due; `next_tick_ms` says when to call again.

        Raises LogFull or DiskFull: then nothing was lost, and what is due waits in the dispatcher.
        """
        if now_ms < self._ticked_ms:
            self._clock_went_back(now_ms)
        self._ticked_ms = now_ms
        due = self.near.take_due(now_ms, self.limits.tick_rows_max)
        if len(due):
            self.dispatcher.due.sort_in(due, self.near.table)
        self.dispatcher.stirred = True  # unless all of it goes through
        self._release_resumed()
        self.dispatcher.stirred = self._build_batches(now_ms) or bool(self._resumed)

    def next_tick_ms(self) -> int:
        """When `tick` is wanted next, as far as is known now; NEVER: not before something happens.

        At or before the time of the last tick: there is more to do at once.  Whatever makes it
        sooner calls `on_sooner`.
        """
        if self.dispatcher.stirred and self.dispatcher.due.waiting:
            return self._ticked_ms
        next_due_ms = self.near.wheel.next_due_ms()
        failover_ms = self.dispatcher.next_failover_ms(self._ticked_ms)
        return failover_ms if next_due_ms is None else min(next_due_ms, failover_ms)

    def on_sooner(self, call: Callable[[int], None]) -> None:
        """From now on `call` is told when `next_tick_ms` may have become this soon; 0: at once."""
        self.near.wheel.on_sooner = call
        self.dispatcher.on_stirred = lambda: call(0)

    def resumed(self, room: TargetId) -> None:
        """What waits there is held no longer; a topic's timers go from where they wait."""
        self._resumed.append(self.numbers.number_target(room))
        self.dispatcher.wake()

    def _release_resumed(self) -> None:
        while self._resumed and not self.dispatcher.due.waiting_for(self._resumed[0]):
            self._resumed.popleft()
        if self._resumed:
            ids = self.dispatcher.due.take(self._resumed[0], self.limits.tick_rows_max)
            self.dispatcher.due.sort_in(self.near.live(ids), self.near.table)

    def _clock_went_back(self, now_ms: int) -> None:
        """What was handed out and is no longer due waits again; what was dispatched goes out."""
        self.dispatcher.release_held(now_ms)
        for target in self.dispatcher.due.turns():
            ids = self.near.live(self.dispatcher.due.take_all(target))
            due = self.near.table.due_ms[ids] <= now_ms
            self.dispatcher.due.put_back(target, ids[due])
            self.near.hand_back(ids[~due])

    def _build_batches(self, now_ms: int) -> bool:
        """Cuts batches from the targets in turn; True if there may be more."""
        built = slept = 0
        due = self.dispatcher.due
        turns = due.awake()
        while turns:
            goes = []  # what does not go now will not before an answer comes
            for target in turns:
                if built >= self.limits.tick_batches_max or slept >= SLEEPS_MAX:
                    return True
                if self._build_batch(target, now_ms):
                    built += 1
                    goes.append(target)
                elif self.dispatcher.is_shut(self.numbers.targets[target]):
                    due.sleep(target)
                    slept += 1
            turns = [target for target in goes if due.waiting_for(target)]
        return False

    def _build_batch(self, target: int, now_ms: int) -> bool:
        gathering = self.dispatcher.gathering(target)
        lane = self.dispatcher.choose(self.numbers.targets[target], now_ms, gathering)
        if lane is None:
            return False
        self.flush_acks()  # may raise: nothing is taken yet
        if not lane.begun:
            self._restart(lane, now_ms)
        ids, rows = self._take_batch(target)
        if not len(ids):
            return True
        numbers = sorted(set(rows.source.tolist()))
        index = np.searchsorted(np.array(numbers, dtype=np.uint32), rows.source)
        sources = [self.numbers.sources[number].id for number in numbers]
        dispatched = Dispatched(
            lane.id, lane.epoch, lane.next_sequence, sources, rows.offset, index.astype(np.uint16)
        )
        try:
            position, end = self.log.append(
                log_entries.DISPATCH, [log_entries.encode_dispatch(dispatched)]
            )
        except BaseException:
            self.dispatcher.due.put_back(target, ids)
            raise
        blobs = [self.near.blobs[number] for number in self.near.blobs_of(ids).tolist()]
        batch = make_batch(rows, blobs, lane, lane.next_sequence, position, end)
        batch.target = target
        batch.past_due = rows.due_ms < np.array([blob.accepted_ms if blob else 0 for blob in blobs])
        self.near.remove(ids)
        self.fires.note(rows, now_ms)
        if rows.timer_key is not None:
            self.keyed.ended.note(rows.timer_key.tolist(), now_ms, fired=True)
        if self.schedules:
            for at, source in enumerate(dispatched.sources):
                if self.schedules.waits_from(source):
                    self.schedules.left(source, rows.offset[index == at].tolist())
        self.dispatcher.push(batch)
        self._undurable.append((end, batch))
        self.ledger.fired += batch.count
        self.topics.of_target(target).fired += batch.count
        self.ledger.in_flight += batch.count
        return True

    def _take_batch(self, target: int) -> tuple[Ids, Rows]:
        """Of those that wait; none: all that could be taken are cancelled, or held."""
        ids = self.near.live(self.dispatcher.due.take(target, BATCH_ROWS_MAX))
        if self.holds.by_key:
            ids = self._keep_back(ids, self.numbers.targets[target].topic)
        rows = self.near.rows(ids)
        if rows.body_bytes() > BATCH_BYTES_MAX:
            ends = np.cumsum(rows.size, dtype=np.int64)
            fits = max(1, int(np.searchsorted(ends, BATCH_BYTES_MAX, side="right")))
            self.dispatcher.due.put_back(target, ids[fits:])
            ids, rows = ids[:fits], rows.slice(0, fits)
        return ids, rows

    def _keep_back(self, ids: Ids, topic: str) -> Ids:
        """Those whose keys are not held; the others wait apart from them."""
        hashes = self.near.table.timer_key
        if topic not in self.holds.by_key or hashes is None:
            return ids
        rooms: dict[int, list[int]] = {}
        for at in np.flatnonzero(hashes[ids]).tolist():
            hold = self.holds.of_key(topic, key_in(self.near.body(int(ids[at]))))
            if hold is not None:
                room = self.numbers.number_target(waiting_room(hold))
                rooms.setdefault(room, []).append(at)
        for room, places in rooms.items():
            self.dispatcher.due.add(room, ids[places])
        return np.delete(ids, [at for places in rooms.values() for at in places])

    # -- events -----------------------------------------------------------

    def durable(self, position: int) -> set[str]:
        """The log is committed up to `position`; answers brokers with something new to send.

        Without replicas that is: durable.
        """
        while self._arrivals and self._arrivals[0][0] <= position:
            _, source, offset = self._arrivals.popleft()
            source.durable_offset = offset
        brokers: set[str] = set()
        while self._undurable and self._undurable[0][0] <= position:
            _, batch = self._undurable.popleft()
            batch.durable = True
            brokers.add(batch.lane.id.broker)
        return brokers

    def answered(
        self, batch: FireBatch, outcome: FireOutcome, now_ms: int, reason: str = ""
    ) -> bool:
        """A broker answered a batch, and why it refused it; True if it is stored."""
        lane = batch.lane
        jitter = self._random.random()
        stored = self.dispatcher.answered(batch, outcome, now_ms, jitter, reason)
        if stored:
            self.ledger.in_flight -= batch.count
            self._acks.append(batch.position)
            if len(self._acks) >= ACKS_MAX:
                self.flush_acks()
        elif lane.failures == 1:
            self.dispatcher.stir()  # what waited for this answer may go elsewhere
        if lane.must_restart():
            self.flush_acks()
            self._restart(lane, now_ms)
        return stored

    def _restart(self, lane: FireLane, now_ms: int) -> None:
        epoch = max(lane.next_epoch(now_ms), self.dispatcher.epoch_forgotten + 1)
        restarted = Restarted(lane.id, epoch)
        _, end = self.log.append(log_entries.EPOCH, [log_entries.encode_epoch(restarted)])
        lane.restart(restarted.epoch)
        lane.begun = True
        for each in lane.unacked:
            each.durable = False
            self._undurable.append((end, each))

    def forget_gone(self) -> None:
        """Lanes of topics that are gone, some at once; counts of those, and their targets' numbers.

        Raises LogFull, DiskFull: ask again.
        """
        self.topics.forget(self.dispatcher.serves)
        self._give_up_targets()
        lanes = self.dispatcher.spare_lanes(FORGOTTEN_MAX)
        if lanes:
            self.flush_acks()  # in the log, too, all of it is answered
        for lane in lanes:
            if not lane.unused:
                forgotten = Restarted(lane.id, log_entries.FORGOTTEN)
                self.log.append(log_entries.EPOCH, [log_entries.encode_epoch(forgotten)])
            self.dispatcher.forget(lane.id)

    def _give_up_targets(self) -> None:
        """Of topics that are gone, and that are not counted any more: nothing is left of these.

        What is held is asked, too: were a count wrong, a timer would go to another's topic.
        """
        targets = self.numbers.targets
        busy = {*self.dispatcher.busy_targets(), *self._resumed}
        looked_at = [number for number in self.numbers.next_looked_at() if number not in busy]
        gone = [number for number in looked_at if self._is_gone(targets[number].topic)]
        held = self.tiers.targets() if gone else set()
        parked = set(self.segments.parked()) if gone else set()
        for number in gone:
            if number not in held and targets[number] not in parked:
                self.dispatcher.due.forget(number)
                self.numbers.give_up_target(number)

    def _is_gone(self, topic: str) -> bool:
        return not (self.topics.may_be_left(topic) or self.dispatcher.serves(topic))

    def flush_acks(self) -> None:
        """Writes held back acknowledgements to the log.  Raises LogFull, DiskFull."""
        if self._acks:
            self.log.append(log_entries.ACK, [log_entries.encode_ack(self._acks)])
            self._acks = []

    # -- all together ------------------------------------------------------

    def check(self) -> None:
        """Raises InvariantError unless every pending timer lies where something will fire it."""
        held = self.tiers.held()
        if held != self.ledger.pending:
            raise InvariantError(f"{held} timers are held, the ledger says {self.ledger}")
        self.topics.check(self)
        self.near.check(self.dispatcher.due.waiting)
