"""A timer shard in a world made of memory: a broker that never forgets, a disk that does, a clock.

The model is what the broker knows: every delayed message it accepted, what was delivered to it (and
refused as a duplicate), which cancels were answered.  Its own checks run as things happen; `drain`
runs the world to its end and checks that nothing is missing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np

from duemq.v1 import message_pb2
from storage import frame, record
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from timer_service.entries import Cancelled, LaneId, SourceId
from timer_service.jobs import Job, Save
from timer_service.lane import Batch, Outcome
from timer_service.limits import Limits
from timer_service.scheduler import CANCELLED, FIRED, NOT_YET, UNKNOWN, Scheduler
from timer_service.store import Store, open_store

DATA = "/data"
START_MS = 1_700_000_000_000
BROKER = "b1"
SOURCE = SourceId(0xFEED, 2)
# Small, so that every path is walked: evictions, flushes, loads, splits.
LIMITS = Limits(
    near_window_ms=10_000,
    near_rows_max=100,
    near_bytes_max=12_000,
    memtable_rows_max=30,
    memtable_bytes_max=6_000,
    park_rows_min=5,
)
TOPICS = {"any": -1, "keyed": 1}
WIRE_BYTES = 1 << 20


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


@dataclass
class BrokerModel:
    """Stores batches of lanes by sequence, once; checks what it is given."""

    due_ms: list[int] = field(default_factory=list)  # by offset
    frames: list[tuple[int, bytes]] = field(default_factory=list)  # (first offset, bytes)
    delivered: Counter[int] = field(default_factory=Counter)
    lanes: dict[tuple[LaneId, int], int] = field(default_factory=dict)  # next sequence
    cancelled: set[int] = field(default_factory=set)  # answered so

    def accept(self, due_ms: list[int], body_bytes: int, topic: str) -> None:
        base = len(self.due_ms)
        records = [
            message_pb2.Record(body=b"x" * body_bytes, message_id=str(base + n))
            for n in range(len(due_ms))
        ]
        data = timer_frame(base, records, due_ms, topic=topic, target_queue_id=TOPICS[topic])
        self.due_ms += due_ms
        self.frames.append((base, data))

    def frames_from(self, offset: int, count: int) -> bytes:
        wanted = [data for base, data in self.frames if base >= offset]
        return b"".join(wanted[:count])

    def store(self, batch: Batch, now_ms: int, *, refuse: bool) -> Outcome:
        key = batch.lane.id, batch.lane.epoch
        expected = self.lanes.get(key)
        if expected is not None and batch.sequence < expected:
            return Outcome.STORED
        if expected is not None and batch.sequence > expected:
            return Outcome.OUT_OF_SEQUENCE
        if refuse:
            return Outcome.REFUSED
        self.lanes[key] = batch.sequence + 1
        self._deliver(batch, now_ms)
        return Outcome.STORED

    def _deliver(self, batch: Batch, now_ms: int) -> None:
        sizes = np.frombuffer(batch.sizes, dtype="<u4")
        assert int(sizes.sum()) == len(batch.records)
        records = message_pb2.RecordBatch.FromString(batch.records).records
        assert len(records) == batch.count == len(sizes)
        for each in records:
            offset = int(each.message_id)
            self.delivered[offset] += 1
            assert self.delivered[offset] == 1, f"{offset} was delivered twice"
            assert offset not in self.cancelled, f"{offset} was cancelled and delivered"
            assert each.due_ms == self.due_ms[offset]
            assert each.due_ms <= now_ms, f"{offset} was early"


class World:
    """The shard and everything around it."""

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)
        self.now_ms = START_MS
        self.broker = BrokerModel()
        self.disk = FaultyDisk()
        self.restarts = 0
        self._topics = sorted(TOPICS)
        self._job: Job | None = None
        self._cancels: list[tuple[int, int]] = []  # (offset, log end) not yet answered
        self.store: Store = self._open()

    @property
    def scheduler(self) -> Scheduler:
        return self.store.scheduler

    # -- what happens

    def ingest(self, frames: int) -> None:
        source = self.scheduler.numbers.source(SOURCE)
        offset = source.next_offset if source else 0
        data = self.broker.frames_from(offset, frames)
        if data:
            self.scheduler.ingest(SOURCE, BROKER, data, self.now_ms)

    def tick(self) -> None:
        self.scheduler.tick(self.now_ms)

    def sync(self) -> None:
        while self.store.log.write_pending():
            pass
        self._settle()

    def _settle(self) -> None:
        durable = self.store.log.durable_position
        self.scheduler.durable(durable)
        done = [offset for offset, end in self._cancels if end <= durable]
        self._cancels = [each for each in self._cancels if each[1] > durable]
        for offset in done:
            assert not self.broker.delivered[offset]
            self.broker.cancelled.add(offset)

    def send(self, *, refuse_share: float = 0.0, drop: bool = False) -> None:
        """Puts what is sendable on the wire; answers come back, unless the connection drops."""
        batches = self.scheduler.dispatcher.sendable(BROKER, self.now_ms, WIRE_BYTES)
        assert all(
            batch.durable and batch.end <= self.store.log.durable_position for batch in batches
        )
        answers = [
            (
                batch,
                self.broker.store(batch, self.now_ms, refuse=self.random.random() < refuse_share),
            )
            for batch in batches
        ]
        if drop:
            self.scheduler.dispatcher.disconnected(BROKER, self.now_ms)
            self.scheduler.dispatcher.connected(BROKER)
        for batch, outcome in answers:
            self.scheduler.answered(batch, outcome, self.now_ms)

    def cancel(self, offset: int) -> str:
        due_ms = self.broker.due_ms[offset]
        handle = Cancelled(SOURCE, offset, due_ms)
        answer = self.scheduler.cancel(handle, self.now_ms)
        if answer.outcome == CANCELLED:
            assert not self.broker.delivered[offset]
            self._cancels.append((offset, answer.end))
        elif answer.outcome == FIRED:
            assert due_ms <= self.now_ms
            assert offset not in self.broker.cancelled
        else:
            source = self.scheduler.numbers.source(SOURCE)
            assert answer.outcome == (UNKNOWN if source is None else NOT_YET)
            assert source is None or offset >= source.next_offset
        return answer.outcome

    def housekeep(self) -> bool:
        """Runs one job, if any; a checkpoint waits for the log."""
        job = self.store.housekeeper.next_job(self.now_ms)
        if job is None:
            return False
        self.run(job)
        return True

    def checkpoint(self) -> None:
        self.run(self.store.housekeeper.save(self.now_ms))

    def run(self, job: Job) -> None:
        if isinstance(job, Save):
            self.sync()
        job.run()
        self.store.housekeeper.finish(job, self.now_ms)

    # -- what goes wrong

    def set_topics(self, topics: list[str]) -> None:
        """Only these have a route."""
        self._topics = topics
        routes = {topic: {BROKER: 2} for topic in topics}
        self.scheduler.dispatcher.set_routes(routes)

    def restart(self, disk: FaultyDisk) -> None:
        """The process is gone; another starts on what the disk kept."""
        self._cancels = []
        self.restarts += 1
        while True:
            self.disk = disk
            try:
                self.store = self._open()
                break
            except PowerCut:
                disk = disk.after_power_cut(self.random)
        self.scheduler.check()

    def kill(self) -> None:
        self.restart(self.disk.after_kill())

    def power_cut(self) -> None:
        self.restart(self.disk.after_power_cut(self.random))

    def cut_power_in(self, operations: int) -> None:
        """The power goes within so many operations on the disk."""
        self.disk.cut_at = self.disk.operations + operations

    def _open(self) -> Store:
        self.disk.makedirs(DATA)
        self.disk.makedirs(f"{DATA}/log")
        self.disk.makedirs(f"{DATA}/segments")
        store = open_store(DATA, self.disk, LIMITS, self.now_ms)
        store.scheduler.dispatcher.set_routes({topic: {BROKER: 2} for topic in self._topics})
        store.scheduler.dispatcher.connected(BROKER)
        return store

    # -- the end

    def drain(self, steps_max: int = 2_000) -> None:
        """Lets time pass until nothing is pending; checks that everything was done, once."""
        self.set_topics(sorted(TOPICS))
        for _ in range(steps_max):
            self.ingest(100)
            self.tick()
            self.sync()
            self.send()
            if not self.housekeep() and not self._busy():
                next_ms = self.scheduler.next_due_ms()
                if next_ms is None:
                    assert not self.scheduler.segments.parked()
                    break
                self.now_ms = max(self.now_ms + 1, next_ms)
        self.check_end()

    def _busy(self) -> bool:
        dispatcher = self.scheduler.dispatcher
        if self.scheduler.ledger.in_flight or dispatcher.waiting:
            self.now_ms += 10  # a lane may be waiting to try again
            return True
        source = self.scheduler.numbers.source(SOURCE)
        return (source.next_offset if source else 0) < len(self.broker.due_ms)

    def check_end(self) -> None:
        self.scheduler.check()
        ledger = self.scheduler.ledger
        everything = set(range(len(self.broker.due_ms)))
        delivered = {offset for offset, count in self.broker.delivered.items() if count}
        assert ledger.accepted == len(everything)
        assert ledger.pending == 0
        assert ledger.in_flight == 0
        assert ledger.fired == len(delivered)
        assert ledger.cancelled == len(everything - delivered)
        assert self.broker.cancelled <= everything - delivered
