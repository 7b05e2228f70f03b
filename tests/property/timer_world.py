"""A timer shard in a world made of memory: brokers that never forget, a disk that does, a clock.

The model is what the brokers know: every delayed message they accepted, what was delivered to them
(and refused as a duplicate), which cancels were answered.  Its own checks run as things happen;
`drain` runs the world to its end and checks that nothing is missing.

The world does what the shell (timer_service/shard.py) does: it gives up a job that a full disk
refused, runs one job at a time, and ticks `AHEAD_MS` before the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from duemq.errors import DuemqError
from duemq.protocol.due import Edges
from duemq.v1 import message_pb2
from duemq_server.storage import frame, record
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.disk.data_directory import DataDirectory, open_directory
from duemq_server.timer_service.disk.housekeeping import Job, Save
from duemq_server.timer_service.far.bodies import Files
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.due_counts import CountBlocks
from duemq_server.timer_service.far.look_up import LookUp, Query
from duemq_server.timer_service.far.reading import as_rows
from duemq_server.timer_service.scheduling.cancelling import (
    CANCELLED,
    FIRED,
    NOT_YET,
    PENDING,
    UNKNOWN,
    Cancelling,
)
from duemq_server.timer_service.scheduling.dispatch import NEVER
from duemq_server.timer_service.scheduling.fire_lane import FireBatch, FireOutcome
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.limits import AHEAD_MS, Limits
from duemq_server.timer_service.timers.log_entries import Cancelled, LaneId, SourceId
from duemq_server.timer_service.views.finding import HandleFinder
from duemq_server.timer_service.views.forecast import Forecast, split_blocks
from duemq_server.timer_service.views.listing import Page, PageItem, PageQuery, Position
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.property.hold_model import HoldModel
from tests.property.keyed_model import KEYED_FROM, SHARD, KeyedModel

DATA = "/data"
START_MS = 1_700_000_000_000
BROKER, OTHER = "b1", "b2"
SOURCE = SourceId(0xFEED, 2)
# Small, so that every path is walked: evictions, flushes, loads, splits.
LIMITS = Limits(
    near_window_ms=10_000,
    near_rows_max=100,
    near_bytes_max=12_000,
    memtable_rows_max=30,
    memtable_bytes_max=6_000,
    park_rows_min=5,
    free_bytes_min=2_000,
)
TIGHT = replace(
    LIMITS,
    tick_rows_max=7,
    tick_batches_max=2,
    log_segment_bytes=16 << 10,
    log_pending_bytes_max=8 << 10,
)
TOPICS = {"any": -1, "keyed": 1}
topics = st.integers(0, 255).map(lambda number: sorted(TOPICS)[number % len(TOPICS)])
"""One of those that there are when it is drawn."""
Goes = tuple[str, int]
"""Topic and queue, -1: any, that a message is for."""
WIRE_BYTES = 1 << 20
PAGES_MAX = 10_000  # of a list


def entries_of(records: list[message_pb2.Record]) -> list[bytes]:
    """Each record as it lies in a RecordBatch."""
    return [message_pb2.RecordBatch(records=[each]).SerializeToString() for each in records]


def timer_frame(
    base_offset: int,
    records: list[message_pb2.Record],
    due_ms: list[int],
    *,
    topic: str = "any",
    target_queue_id: int = -1,
    queue_id: int = SOURCE.queue_id,
    position: int = 0,
) -> bytes:
    """A frame of delayed messages as it lies in a broker's log."""
    encoded = entries_of(records)
    sizes = np.array([len(each) for each in encoded], dtype="<u4").tobytes()
    hashes = np.arange(len(encoded), dtype="<u4").tobytes()
    parts = frame.encode_parts(
        topic="%TIMER%",
        queue_id=queue_id,
        base_offset=base_offset,
        store_ms=START_MS,
        sizes=sizes,
        tag_hashes=hashes,
        key_hashes=hashes,
        payload=b"".join(encoded),
        target_topic=topic,
        target_queue_id=target_queue_id,
        due_ms=np.array(due_ms, dtype="<i8").tobytes(),
    )
    length = sum(map(record.nbytes, parts))
    return b"".join(bytes(part) for part in record.encode(frame.KIND, parts, length, position, 0))


class Pending(NamedTuple):
    """A timer that is pending."""

    due_ms: int
    source: SourceId
    offset: int
    topic: str


def message_id(entry: bytes | memoryview) -> int:
    [found] = message_pb2.RecordBatch.FromString(bytes(entry)).records
    return int(found.message_id)


class Listing:
    """A list of a topic's timers, a page at a time; anything may happen between and during them."""

    def __init__(self, world: World, topic: str, limit: int, every: int) -> None:
        """`every`: one timer in so many is wanted."""
        self._world = world
        self._topic, self._limit, self._every = topic, limit, every
        self._after: Position | None = None
        self._page: Page[int] | None = None
        self._pin = ExitStack()
        self._pages = 0
        self.over = False
        self.seen: list[Position] = []
        self._at_begin = self._wanted() if world.is_durable() else set()

    def _wanted(self) -> set[Position]:
        id_of = self._world.keyed.id_of
        return {
            Position(each.due_ms, *each.source, each.offset)
            for each in self._world.pending()
            if each.topic == self._topic
            and id_of(Cancelled(each.source, each.offset, each.due_ms)) % self._every == 0
        }

    def open(self) -> None:
        """What memory holds is noted."""

        def make(entry: bytes | memoryview) -> int | None:
            offset = message_id(entry)
            return None if offset % self._every else offset

        scheduler = self._world.scheduler
        wanted = PageQuery(self._topic, 0, 1 << 60, self._limit, self._after)
        self.lose()
        self._page = Page(scheduler, wanted, make, wants_all=self._every == 1)
        self._pin.enter_context(scheduler.segments.pinned(self._page.files()))

    def read(self) -> None:
        """Blocks are read; the page is over."""
        if self._page is None:
            self.open()
        page, self._page = self._page, None
        assert page is not None
        with self._pin:
            page.run()
        found = page.still_pending(self._world.scheduler)
        if not self._world.is_durable():
            return  # what may be lost is not told: the page is asked for again
        for each in found:
            assert each.target.topic == self._topic
            self.seen.append(each.position)
        self._pages += 1
        assert self._pages <= PAGES_MAX, "it does not go on"
        self._after = page.next
        self.over = page.next is None
        if self.over:
            self._check()

    def lose(self) -> None:
        """The process that read the page is gone."""
        self._page = None
        self._pin.close()

    def _check(self) -> None:
        assert self.seen == sorted(set(self.seen))
        assert self._at_begin & self._wanted() <= set(self.seen)


@dataclass
class BrokerModel:
    """Stores batches of lanes by sequence, once; checks what it is given."""

    due_ms: list[int] = field(default_factory=list)  # by offset
    topics: list[str] = field(default_factory=list)  # by offset
    frames: list[tuple[int, bytes]] = field(default_factory=list)  # (first offset, bytes)
    delivered: Counter[int] = field(default_factory=Counter)
    lanes: dict[tuple[LaneId, int], int] = field(default_factory=dict)  # next sequence
    stored: dict[tuple[LaneId, int, int], bytes] = field(default_factory=dict)  # by sequence
    incomplete_repeats: bool = False  # an operator gave some timers of a batch up
    cancelled: set[int] = field(default_factory=set)  # answered so
    decided: set[int] = field(default_factory=set)  # dispatched, and then the clock went back
    moved: dict[int, int] = field(default_factory=dict)  # due times that somebody else set
    targets: dict[int, set[Goes]] = field(default_factory=dict)  # where each may go

    def accept(self, due_ms: list[int], body_bytes: int, topic: str) -> None:
        base = len(self.due_ms)
        records = [
            message_pb2.Record(body=b"x" * body_bytes, message_id=str(base + n))
            for n in range(len(due_ms))
        ]
        data = timer_frame(base, records, due_ms, topic=topic, target_queue_id=TOPICS[topic])
        self.due_ms += due_ms
        self.topics += [topic] * len(due_ms)
        for n in range(len(due_ms)):
            self.targets[base + n] = {(topic, TOPICS[topic])}
        self.frames.append((base, data))

    def check_target(self, message: int, topic: str, queue_id: int = -1) -> None:
        """It is bound for this topic; `queue_id`: and this queue, unless it may go to any."""
        if message not in self.targets:
            return  # a schedule's
        found = [queue for name, queue in self.targets[message] if name == topic]
        assert found, f"{message} is for {self.targets[message]}, not for {topic}"
        assert queue_id < 0 or {-1, queue_id} & {*found}

    def due_of(self, message: int) -> int:
        """When it is due, by what was answered last."""
        return self.moved[message] if message in self.moved else self.due_ms[message]

    def forget_moves_from(self, offset: int) -> None:
        """These messages are not at the shard, nor is what it once did with them."""
        self.moved = {each: due_ms for each, due_ms in self.moved.items() if each < offset}

    def frames_from(self, offset: int, count: int) -> bytes:
        wanted = [data for base, data in self.frames if base >= offset]
        return b"".join(wanted[:count])

    def store(self, batch: FireBatch, now_ms: int, *, refuse: bool) -> FireOutcome:
        key = batch.lane.id, batch.lane.epoch
        expected = self.lanes.get(key)
        if expected is not None and batch.sequence < expected:
            again = self.stored[(*key, batch.sequence)] == batch.sizes + batch.records
            assert again or self.incomplete_repeats
            return FireOutcome.STORED
        if expected is not None and batch.sequence > expected:
            return FireOutcome.OUT_OF_SEQUENCE
        if refuse:
            return FireOutcome.REFUSED
        self.lanes[key] = batch.sequence + 1
        self.stored[(*key, batch.sequence)] = batch.sizes + batch.records
        self._deliver(batch, now_ms)
        return FireOutcome.STORED

    def _deliver(self, batch: FireBatch, now_ms: int) -> None:
        sizes = np.frombuffer(batch.sizes, dtype="<u4")
        assert int(sizes.sum()) == len(batch.records)
        records = message_pb2.RecordBatch.FromString(batch.records).records
        assert len(records) == batch.count == len(sizes)
        for each in records:
            offset = int(each.message_id)
            self.check_target(offset, batch.lane.id.topic, batch.lane.id.queue_id)
            self.delivered[offset] += 1
            assert self.delivered[offset] == 1, f"{offset} was delivered twice"
            assert offset not in self.cancelled, f"{offset} was cancelled and delivered"
            assert each.due_ms == self.due_of(offset)
            assert each.due_ms <= now_ms or offset in self.decided, f"{offset} was early"


class World:
    """The shard and everything around it."""

    def __init__(self, seed: int = 0, limits: Limits = LIMITS) -> None:
        self.random = Random(seed)
        self._now_ms = START_MS
        self.limits = limits
        self.broker = BrokerModel()
        self.disk = FaultyDisk()
        self.restarts = 0
        self._topics = sorted(TOPICS)
        self._away: set[str] = {OTHER}
        self._job: Job | None = None  # taken, and waits for the log
        self._cancels: list[tuple[int, int]] = []  # (offset, log end) not yet answered
        self.listings: list[Listing] = []
        self._counting: list[tuple[CountBlocks, list[tuple[Block, int]]]] = []
        self.keyed = KeyedModel(self)
        self.holds = HoldModel(self)
        self.directory: DataDirectory = self._open()

    @property
    def scheduler(self) -> Scheduler:
        return self.directory.scheduler

    @property
    def now_ms(self) -> int:
        """The shard's clock."""
        return self._now_ms

    @now_ms.setter
    def now_ms(self, now_ms: int) -> None:
        if now_ms < self._now_ms:
            for lane in self.scheduler.dispatcher.lanes():
                for batch in lane.unacked:
                    records = message_pb2.RecordBatch.FromString(batch.records).records
                    self.broker.decided.update(int(each.message_id) for each in records)
        self._now_ms = now_ms
        self.keyed.latest_ms = max(self.keyed.latest_ms, now_ms)

    # -- what happens

    def ingest(self, frames: int) -> None:
        data = self.broker.frames_from(self.next_offset(), frames)
        if data and not self.directory.housekeeper.short_of_space():
            with suppress(LogFull, DiskFull):
                self.scheduler.ingest(SOURCE, BROKER, data, self.now_ms)

    def next_offset(self) -> int:
        """What the shard has got ends here."""
        source = self.scheduler.numbers.source(SOURCE)
        return source.next_offset if source else 0

    def tick(self, ahead_ms: int = 0) -> None:
        begin = self.scheduler.log.end_position
        with suppress(LogFull, DiskFull):
            self.scheduler.tick(self.now_ms + ahead_ms)
        self.holds.check_dispatched(begin)

    def sync(self) -> None:
        with suppress(DiskFull):
            while self.directory.log.write_pending():
                pass
        self._settle()

    def is_durable(self) -> bool:
        """Whether all that is decided would survive a crash; it is synced if it can be."""
        self.sync()
        return self.committed == self.directory.log.end_position

    @property
    def committed(self) -> int:
        """Where the log ends that counts."""
        return self.directory.log.durable_position

    def _settle(self) -> None:
        durable = self.committed
        self.scheduler.durable(durable)
        done = [offset for offset, end in self._cancels if end <= durable]
        self._cancels = [each for each in self._cancels if each[1] > durable]
        for offset in done:
            assert not self.broker.delivered[offset]
            self.broker.cancelled.add(offset)
        self.keyed.settle(durable)
        self.holds.settle(durable)

    def send(self, *, refuse_share: float = 0.0, drop: bool = False) -> None:
        """Puts what is sendable on the wire; answers come back, unless the connection drops."""
        for name in (BROKER, OTHER):
            self._send(name, refuse_share, drop=drop)

    def _send(self, name: str, refuse_share: float, *, drop: bool) -> None:
        batches = self.scheduler.dispatcher.sendable(name, self.now_ms, WIRE_BYTES)
        assert all(batch.durable and batch.end <= self.committed for batch in batches)
        answers = [
            (
                batch,
                self.broker.store(batch, self.now_ms, refuse=self.random.random() < refuse_share),
            )
            for batch in batches
        ]
        if drop and name not in self._away:
            self.scheduler.dispatcher.disconnected(name, self.now_ms)
            self.scheduler.dispatcher.connected(name)
        for batch, outcome in answers:
            with suppress(LogFull, DiskFull):
                self.scheduler.answered(batch, outcome, self.now_ms)

    def cancel(self, offset: int) -> str:
        handle = self.keyed.handle(offset)
        try:
            [outcome] = self.cancel_handles([handle])
        except (LogFull, DiskFull):
            return NOT_YET
        source = self.scheduler.numbers.source(handle.source)
        if source is None or handle.offset >= source.next_offset:
            assert outcome == NOT_YET
        elif outcome == UNKNOWN:  # so long ago that nobody remembers, or the clock said so once
            kept_ms = self.now_ms + AHEAD_MS - self.limits.tombstone_keep_ms
            assert handle.due_ms < kept_ms or (
                handle.due_ms <= self.scheduler.tombstones.forgotten_ms
            )
        else:
            assert outcome in (CANCELLED, FIRED)
        return str(outcome)

    def cancel_handles(self, handles: list[Cancelled]) -> list[str | DuemqError]:
        cancelling = Cancelling(self.scheduler, handles)
        while not cancelling.advance(self.now_ms + AHEAD_MS):
            query = cancelling.query()
            look_up = self.look_up([query])
            look_up.run()
            self.scheduler.segments.looked_up(look_up)
            cancelling.answered(query)
        return self.cancelled(cancelling, handles)

    def look_up(self, queries: list[Query]) -> LookUp:
        return self.scheduler.segments.look_up(queries, self.scheduler.numbers.find_source)

    def cancelled(self, cancelling: Cancelling, handles: list[Cancelled]) -> list[str | DuemqError]:
        """The outcomes, checked against what the broker knows."""
        outcomes = cancelling.outcomes()
        assert outcomes is not None
        for handle, outcome in zip(handles, outcomes, strict=True):
            offset = self.keyed.id_of(handle)
            if outcome == CANCELLED:
                assert not self.broker.delivered[offset]
                self._cancels.append((offset, cancelling.end))
                self.keyed.cancelled_by_handle(offset, handle, cancelling.end)
            elif outcome == FIRED:
                due_ms = self.broker.due_of(offset)
                assert due_ms <= self.now_ms + AHEAD_MS or self._fired(offset)
                assert offset not in self.broker.cancelled
        return outcomes

    def first_handle(self, offset: int) -> Cancelled:
        """Of a message of the broker, as it was accepted."""
        return Cancelled(SOURCE, offset, self.broker.due_ms[offset])

    def _fired(self, offset: int) -> bool:
        return bool(self.broker.delivered[offset]) or offset in self.broker.decided

    def housekeep(self) -> bool:
        """Runs one job, if any; a checkpoint waits for the log."""
        return self._do(lambda: self.directory.housekeeper.next_job(self.now_ms))

    def flush(self) -> None:
        """Writes the memtable out, however little is in it."""
        if self._job is None and self.scheduler.tiers.memtable.rows:
            self._job = self.scheduler.tiers.begin_flush(self.now_ms)
        self.housekeep()

    def checkpoint(self) -> None:
        self._do(lambda: self.directory.housekeeper.save(self.now_ms))

    def _do(self, choose: Callable[[], Job | None]) -> bool:
        """Runs the job that waits for the log, or else another; True if one is done.

        In place of one that a full disk refused, the next of another kind.
        """
        with suppress(LogFull, DiskFull):
            self._job = self._job or choose()
            if self._job is None:
                self.scheduler.flush_acks()
                return False
            if isinstance(self._job, Save):
                self.sync()
                if self.committed < self._job.position:
                    return False
            job, self._job = self._job, None
            return self.try_run(job) or self.housekeep()
        return False

    def try_run(self, job: Job) -> bool:
        """Runs a job; False: a full disk refused it, and it is given up."""
        try:
            job.run()
        except DiskFull:
            self.directory.housekeeper.no_space(job, self.now_ms)
            return False
        self.directory.housekeeper.finish(job, self.now_ms)
        return True

    def run(self, job: Job) -> None:
        """Runs a job; a checkpoint only when the log is durable."""
        job.run()
        self.directory.housekeeper.finish(job, self.now_ms)

    # -- looking inside

    def count_some(self, blocks: int, at_ms: int | None = None) -> None:
        """Reads some of the blocks that a forecast needs; `join_counted` takes that over."""
        edges = Edges.at(at_ms or self.now_ms)
        missing = self.scheduler.due_counts.missing(self.scheduler.segments.blocks(), edges)
        self._counting.append((self._read_blocks(missing[:blocks]), missing[:blocks]))

    def join_counted(self) -> None:
        for job, read in self._counting:
            steps = [step_ms for _, step_ms in read]
            unmet = self.scheduler.tombstones.unmet_in
            self.scheduler.due_counts.join(job.counted, steps, unmet)
        self._counting = []

    def _read_blocks(self, blocks: list[tuple[Block, int]]) -> CountBlocks:
        segments, numbers = self.scheduler.segments, self.scheduler.numbers
        job = CountBlocks(
            self.disk, segments.directory, blocks, self.scheduler.topics.slot, numbers.find_source
        )
        job.run()
        return job

    def check_forecast(self, topic: str | None) -> None:
        """Against every timer that can be found."""
        self.join_counted()
        self.count_some(1 << 20)
        self.join_counted()
        now_ms, edges = self.now_ms, Edges.at(self.now_ms)
        split = [(each, 60_000) for each in split_blocks(self.scheduler, now_ms)]
        read = {(x.block.file, x.block.position): x for x in self._read_blocks(split).counted}
        slot = self.scheduler.topics.slot(topic) if topic else None
        found = Forecast(self.scheduler, now_ms, edges, slot, read).run()
        slot_of = self.scheduler.topics.slot_of_left
        pending = self.pending()
        dues = [each.due_ms for each in pending if topic is None or slot_of(each.topic) == slot]
        assert sum(each.pending for each in found) == len(dues)
        for each in found:
            assert each.pending == sum(each.from_ms <= due_ms < each.to_ms for due_ms in dues)
            assert (each.from_ms == 0) == (each.to_ms == now_ms)

    def find(self, message: int) -> str:
        """What became of a timer, checked against every timer that can be found."""
        handle = self.keyed.handle(message)
        finding = HandleFinder(self.scheduler, [handle])
        while not finding.advance(self.now_ms + AHEAD_MS):
            query = finding.query()
            look_up = self.look_up([query])
            look_up.run()
            self.scheduler.segments.looked_up(look_up)
            finding.answered(query)
        outcomes = finding.outcomes()
        assert outcomes is not None
        [outcome] = outcomes
        pending = {(*each.source, each.offset) for each in self.pending()}
        assert (outcome == PENDING) == ((*handle.source, handle.offset) in pending)
        if outcome == PENDING:
            located = finding.located[handle]
            with Files(self.disk, self.scheduler.segments.directory) as files:
                assert message_id(located.bodies.read(located.row, files)) == message
        return str(outcome)

    def listed(self, topic: str) -> list[PageItem[int]]:
        """All messages of a topic, each bound for where it shall go."""
        found: list[PageItem[int]] = []
        after: Position | None = None
        while True:
            page = Page(
                self.scheduler,
                PageQuery(topic, 0, 1 << 60, 1_000, after),
                message_id,
                wants_all=True,
            )
            page.run()
            found += page.still_pending(self.scheduler)
            after = page.next
            if after is None:
                break
        for each in found:
            assert each.target.topic == topic
            self.broker.check_target(each.made, topic, each.target.queue_id)
        return found

    def check_listed(self) -> None:
        """What is listed of every topic, and how many are counted."""
        counts = {topic: len(self.listed(topic)) for topic in sorted(TOPICS)}
        assert sum(counts.values()) == self.scheduler.ledger.pending
        for topic, count in counts.items():
            if self.scheduler.topics.counted(topic):
                assert self.scheduler.topics.of(topic).pending == count
            elif count:
                assert self.scheduler.topics.may_be_left(topic)

    def pending(self) -> list[Pending]:
        """All that is pending, found where it lies, in the order of a list."""
        scheduler = self.scheduler
        near = scheduler.near
        parts = [near.rows(near.pending_ids())]
        parts += [rows for rows, _ in scheduler.tiers.pieces()]
        for each in scheduler.segments.blocks():
            index = scheduler.segments.index_of(each)
            rows = as_rows(index, each.cursor, each.count)
            parts.append(scheduler.numbers.translate(rows, index.sources, index.targets))
        found = []
        for rows in parts:
            unmet = scheduler.tombstones.unmet_in(rows)
            rows = rows if unmet is None else rows.take(~unmet)
            found += [
                Pending(
                    due_ms,
                    scheduler.numbers.sources[source].id,
                    offset,
                    scheduler.numbers.targets[target].topic,
                )
                for due_ms, source, offset, target in zip(
                    rows.due_ms.tolist(),
                    rows.source.tolist(),
                    rows.offset.tolist(),
                    rows.target.tolist(),
                    strict=True,
                )
            ]
        assert len(found) == scheduler.ledger.pending
        return sorted(found)

    # -- what goes wrong

    def set_topics(self, topics: list[str]) -> None:
        """Only these have a route."""
        self._topics = topics
        self._route()

    def set_away(self, brokers: set[str]) -> None:
        """Only the others are connected."""
        for name in sorted(brokers - self._away):
            self.scheduler.dispatcher.disconnected(name, self.now_ms)
        for name in sorted(self._away - brokers):
            self.scheduler.dispatcher.connected(name)
        self._away = brokers

    def _route(self) -> None:
        routes = {topic: {BROKER: 2, OTHER: 1} for topic in self._topics}
        self.scheduler.dispatcher.set_routes(routes)

    def fill_disk(self, left_bytes: int) -> None:
        """Somebody else's files leave only so much; 0: and a write of the log has met it."""
        self.disk.capacity_bytes = self.disk.used_bytes() + left_bytes
        self.directory.log.disk_full = not left_bytes

    def free_disk(self) -> None:
        """There is space again."""
        self.disk.capacity_bytes = None
        self.directory.log.disk_full = False

    def heal(self) -> None:
        """Nothing fails any more."""
        self.disk.cut_at = None
        self.free_disk()

    def restart(self, disk: FaultyDisk) -> None:
        """The process is gone; another starts on what the disk kept."""
        self._cancels = []
        self._counting = []
        for each in self.listings:
            each.lose()
        self._job = None
        self.restarts += 1
        self._start(disk)
        self.scheduler.check()
        self.keyed.restarted()
        self.holds.restarted()

    def _start(self, disk: FaultyDisk) -> None:
        while True:
            self.disk = disk
            try:
                self.directory = self._open()
                return
            except PowerCut:
                disk = disk.after_power_cut(self.random)

    def kill(self) -> None:
        self.restart(self.disk.after_kill())

    def kill_on_a_full_disk(self) -> None:
        """What a start gives back of the log's space somebody else takes; the disk stays full."""
        disk = self.disk.after_kill()
        disk.capacity_bytes = 0
        self.restart(disk)

    def power_cut(self) -> None:
        self.restart(self.disk.after_power_cut(self.random))

    def cut_power_in(self, operations: int) -> None:
        """The power goes within so many operations on the disk."""
        self.disk.cut_at = self.disk.operations + operations

    def _open(self) -> DataDirectory:
        self.disk.makedirs(DATA)
        self.disk.makedirs(f"{DATA}/log")
        self.disk.makedirs(f"{DATA}/segments")
        self.directory = open_directory(DATA, self.disk, self.limits, self.now_ms)
        self.scheduler.keyed.source = SourceId(self.directory.producer_id, SHARD)
        self._route()
        for name in sorted({BROKER, OTHER} - self._away):
            self.scheduler.dispatcher.connected(name)
        return self.directory

    # -- the end

    def drain(self, steps_max: int = 2_000) -> None:
        """Lets time pass until nothing is pending; checks that everything was done, once."""
        self.heal()
        self.keyed.finish_all()
        self.set_topics(sorted(TOPICS))
        self.set_away(set())
        for _ in range(steps_max):
            self.holds.resume_all()
            self.ingest(100)
            self.tick(AHEAD_MS)  # always: a tick at an earlier time means that the clock went back
            self.sync()
            self.send()
            if not self.housekeep() and not self._busy():
                next_ms = self.scheduler.tiers.next_due_ms()
                if next_ms is None:
                    assert not self.scheduler.segments.parked()
                    break
                # What is parked is overdue, and is looked at again after a while.
                self.now_ms = next_ms if next_ms > self.now_ms else self.now_ms + 100
        self.check_end()

    def _busy(self) -> bool:
        dispatcher = self.scheduler.dispatcher
        if self.scheduler.ledger.in_flight or dispatcher.due.waiting:
            # A lane may be waiting to try again.
            retries = (dispatcher.next_retry_ms(name, self.now_ms) for name in (BROKER, OTHER))
            retry_ms = min(retries, default=NEVER)
            self.now_ms = self.now_ms + 10 if retry_ms == NEVER else retry_ms
            return True
        return self.next_offset() < len(self.broker.due_ms)

    def check_end(self) -> None:
        self.scheduler.check()
        assert not self.holds.now
        ledger = self.scheduler.ledger
        keyed = self.keyed
        came = {message for message in keyed.handles if message >= KEYED_FROM}
        everything = came.union(range(len(self.broker.due_ms)))
        delivered = {offset for offset, count in self.broker.delivered.items() if count}
        assert len(came) == keyed.came
        assert ledger.accepted == len(everything) + keyed.moved
        assert ledger.replaced == len(keyed.replaced) + keyed.moved
        assert not keyed.replaced & delivered
        assert everything - delivered >= keyed.gone
        assert ledger.pending == 0
        assert ledger.in_flight == 0
        assert ledger.fired == len(delivered)
        gone = everything - delivered - keyed.replaced
        assert ledger.cancelled + ledger.dropped == len(gone)
        assert self.broker.cancelled <= everything - delivered
        self._check_topics(everything, delivered)

    def _check_topics(self, everything: set[int], delivered: set[int]) -> None:
        def of(topic: str, offsets: set[int]) -> int:
            return sum(self.broker.topics[offset] == topic for offset in offsets)

        topics, ledger = list(self.scheduler.topics), self.scheduler.ledger
        for column in ("accepted", "fired", "cancelled", "replaced", "dropped", "lost"):
            total = sum(getattr(each, column) for _, each in topics)
            assert total == getattr(ledger, column)
        mixed = any(not name for name, _ in topics)
        if mixed or self.keyed.came or self.keyed.moved:
            return
        for topic, each in topics:
            assert each.accepted == of(topic, everything)
            assert each.fired == of(topic, delivered)
            assert each.cancelled + each.dropped == of(topic, everything - delivered)
            assert (each.pending, each.far, each.unmet) == (0, 0, 0)
