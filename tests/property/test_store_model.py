"""Random lives of a broker's store: kills, power cuts, full disks, clocks that jump, a cut log.

Whatever happens: what was acknowledged is there, once, at its offset; what anybody has seen at an
offset is never replaced by something else; and a batch that is sent again is a repeat, whatever
else the broker would refuse.  Where a loss is possible (the log was cut, or the power failed before
unsynced entries were on the disk) it takes the log's end and nothing else.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from functools import wraps
from random import Random
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from duemq.errors import OutOfSequence, Overloaded, ReadOnly
from duemq.protocol.limits import FIRE_AHEAD_MS_MAX
from duemq.protocol.names import TIMER_TOPIC
from duemq.v1 import message_pb2
from duemq_server.broker.reading import reader
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.producers import StoredPlace
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import ALL_DUE_MS, Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.errors import DiskFailed, DiskFull
from duemq_server.storage.tools.cut import cut
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.unit.broker.batches import FakeBatch, batch

DATA = "/data"
LOG = f"{DATA}/{recovery.LOG_DIRECTORY}"
SEGMENT_BYTES = 3_000
QUEUES = 2
STORE_SETTINGS = StoreSettings(default_queues=QUEUES, timer_queues=QUEUES)
TOPICS = ("a", "b")
PRODUCER = 7
NOW_MS = 1_760_000_000_000
YEAR_MS = 365 * 86_400_000

Place = tuple[str, int, int]
"""Topic, its id, queue."""


class Sent(NamedTuple):
    """A batch that was accepted.  `place`: where its records lie."""

    batch: FakeBatch
    place: Place
    bodies: list[bytes]
    stored: StoredPlace
    settled: int


def survives(step: Callable[..., None]) -> Callable[..., None]:
    """A step in which the power may fail or the disk be full."""

    @wraps(step)
    def run(self: StoreMachine, **arguments: Any) -> None:
        try:
            step(self, **arguments)
        except PowerCut:
            self.restart(self.disk.after_power_cut(self.random), power=True)
        except DiskFull:
            self.disk.capacity_bytes = None

    return run


class StoreMachine(RuleBasedStateMachine):
    """A store, and what its clients know of it."""

    @initialize(seed=st.integers(0, 1 << 32), unsynced=st.booleans())
    def begin(self, seed: int, unsynced: bool) -> None:
        self.random = Random(seed)
        self.unsynced = unsynced
        self.boots = 1
        self.disk = FaultyDisk()
        self.now_ms = self.latest_ms = self.hidden_until_ms = NOW_MS
        self.epoch = 0
        self.sequences: Counter[tuple[str, int, bool]] = Counter()
        self.cutting = False
        self.unanswered: list[Sent] = []
        self.answered: list[Sent] = []
        self.seen: dict[Place, dict[int, bytes]] = {}
        self.checkpoint_at = 0
        self.taken: Any = None
        self.bodies = 0
        self.store = self.opened()

    def opened(self) -> Store:
        boot = b"%d" % self.boots if self.unsynced else b""
        while True:
            try:
                return recovery.open_store(
                    DATA, self.disk, STORE_SETTINGS, segment_bytes=SEGMENT_BYTES, unsynced_boot=boot
                ).store
            except PowerCut:
                self.disk = self.disk.after_power_cut(self.random)
                self.boots += 1
                boot = b"%d" % self.boots if self.unsynced else b""

    def place(self, topic: str, queue_id: int) -> Place:
        number = self.store.topics.find(topic).id if topic in self.store.topics else -1
        return topic, number, queue_id

    # -- what goes on by itself -------------------------------------------------------------------

    @rule()
    @survives
    def settle(self) -> None:
        try:
            while self.store.log.write_pending():
                pass
        except DiskFull:
            self.store.log.sync()
        self.show(self.store.log.durable_position)

    @rule()
    @survives
    def write_only(self) -> None:
        self.store.log.write_group()
        if self.unsynced:
            self.show(self.store.log.written_position)

    def show(self, position: int) -> None:
        """Consumers see it, and producers have their answers."""
        self.store.durable(position)
        for queue in self.store.all_queues():
            place = self.place(*queue.key)
            found = contents(self.store, queue)
            assert queue.records_from(queue.min_offset) == len(found)
            assert len(queue.page(queue.max_offset, 1)) == 0
            seen = self.seen.setdefault(place, {})
            for offset, body in found.items():
                if offset not in seen:
                    assert queue.entry(offset)[5] <= self.latest_ms, "its time has not come"
                assert seen.setdefault(offset, body) == body, (queue.key, offset)
        self.answered += [sent for sent in self.unanswered if sent.settled <= position]
        self.unanswered = [sent for sent in self.unanswered if sent.settled > position]

    def settle_all(self) -> None:
        capacity, self.disk.capacity_bytes = self.disk.capacity_bytes, None
        while self.store.log.write_pending():
            pass
        self.show(self.store.log.durable_position)
        self.disk.capacity_bytes = capacity

    @rule()
    @survives
    def take_checkpoint(self) -> None:
        self.taken = self.store.freeze()()

    @rule()
    @survives
    def save_checkpoint(self) -> None:
        taken, self.taken = self.taken, None
        if taken is None:
            return
        self.settle_all()
        self.store.check_shown()
        taken = self.store.tables.without_deleted(taken)
        for queue in self.store.all_queues():
            queue.sync()
        recovery.save_checkpoint(DATA, taken, self.disk)
        self.checkpoint_at = taken.position
        self.store.tables.erase_deleted(taken)

    @rule(share=st.floats(0, 1))
    @survives
    def retain(self, share: float) -> None:
        upto = self.checkpoint_at * share
        starts = [s.start for s in self.store.log.segments if s.start <= upto]
        if starts:
            self.store.tables.drop_before(starts[-1])
            self.store.log.delete_before(starts[-1])

    @rule(jump_ms=st.sampled_from([1, 1_000, -500, 3_600_000, -3_600_000, YEAR_MS, -YEAR_MS]))
    @survives
    def clock(self, jump_ms: int) -> None:
        self.now_ms = max(NOW_MS - YEAR_MS, self.now_ms + jump_ms)
        self.latest_ms = max(self.latest_ms, self.now_ms)
        self.store.show_due(self.now_ms)
        assert self.now_ms < self.hidden_until_ms or not len(self.store.hidden)
        self.store.producers.age(5_000)

    @rule(room=st.none() | st.sampled_from([0, 1_000, 1_100_000]))
    @survives
    def fill_disk(self, room: int | None) -> None:
        self.disk.capacity_bytes = None if room is None else self.disk.used_bytes() + room

    @rule(read_only=st.booleans())
    def watch_space(self, read_only: bool) -> None:
        self.store.read_only = read_only

    # -- clients ----------------------------------------------------------------------------------

    @rule(
        topic=st.sampled_from(TOPICS),
        queue_id=st.integers(0, QUEUES - 1),
        timed=st.booleans(),
        sizes=st.lists(st.sampled_from([0, 20, 700]), min_size=1, max_size=4),
        ahead_ms=st.sampled_from([-1, 0, 0, 1, 5]),
        span_ms=st.sampled_from([0, 1, 9]),
    )
    @survives
    def send(
        self,
        topic: str,
        queue_id: int,
        timed: bool,
        sizes: list[int],
        ahead_ms: int,
        span_ms: int,
    ) -> None:
        lane = (topic, queue_id, timed)
        bodies = []
        for size in sizes:
            self.bodies += 1
            bodies.append(b"%d|" % self.bodies + bytes(size))
        due = {"delays_ms": struct.pack("<q", 5)} if timed else {}
        early_ms = [span_ms * (len(sizes) - 1 - index) for index in range(len(sizes))]
        made = batch(
            bodies,
            topic=topic,
            queue_id=queue_id,
            early_ms=struct.pack(f"<{len(sizes)}I", *early_ms) if span_ms else b"",
            producer_id=PRODUCER,
            producer_epoch=self.epoch,
            sequence=self.sequences[lane],
            not_before_ms=0 if timed else self.now_ms + ahead_ms,
            **due,
        )
        self.hidden_until_ms = max(self.hidden_until_ms, made.not_before_ms)
        try:
            accepted = self.store.send(made, self.now_ms, due_ms=self.now_ms)
        except (ReadOnly, Overloaded):
            return
        assert not accepted.duplicate
        self.sequences[lane] += 1
        home = TIMER_TOPIC if timed else topic
        place = self.place(home, accepted.stored.queue_id)
        self.unanswered.append(Sent(made, place, bodies, accepted.stored, accepted.settled))

    @rule(which=st.randoms(use_true_random=False), refusal=st.booleans())
    @survives
    def repeat(self, which: Random, refusal: bool) -> None:
        known = [
            sent
            for sent in [*self.answered[-20:], *self.unanswered]
            if sent.batch.producer_epoch == self.epoch and not self.is_deleted(sent)
        ]
        if known:
            sent = which.choice(known)
            refused = Overloaded("the disk is behind") if refusal else None
            again = self.store.send(sent.batch, self.now_ms, refused)
            assert (again.duplicate, again.stored) == (True, sent.stored)

    def is_deleted(self, sent: Sent) -> bool:
        topic, _, queue_id = sent.place
        return sent.place != self.place(topic, queue_id)

    @rule(topic=st.sampled_from(TOPICS), queue_id=st.integers(0, QUEUES - 1), share=st.floats(0, 1))
    @survives
    def commit(self, topic: str, queue_id: int, share: float) -> None:
        if topic in self.store.topics:
            queue = self.store.queue(topic, queue_id)
            offset = queue.min_offset + int((queue.max_offset - queue.min_offset) * share)
            change = (GroupQueue("g", topic, queue_id), GroupOffset(offset, 3))
            try:
                offset_changes.put(self.store, "g", [change])
            except (ReadOnly, Overloaded):
                return

    @rule(topic=st.sampled_from(TOPICS))
    @survives
    def delete(self, topic: str) -> None:
        if topic not in self.store.topics:
            return
        try:
            self.store.delete_topic(topic)
        except (ReadOnly, Overloaded):
            return

    # -- ends and starts --------------------------------------------------------------------------

    @rule(after=st.integers(1, 15))
    def power_will_fail(self, after: int) -> None:
        self.disk.cut_at = self.disk.operations + after

    @rule()
    @survives
    def kill(self) -> None:
        self.restart(self.disk.after_kill())

    @rule(seed=st.none() | st.integers(0, 1 << 32))
    def fail_power(self, seed: int | None) -> None:
        keep = None if seed is None else Random(seed)
        self.restart(self.disk.after_power_cut(keep), power=True)

    @rule()
    @survives
    def fail_a_sync(self) -> None:
        if self.store.log.written_position == self.store.log.durable_position:
            return
        self.disk.fail_sync_at = self.disk.syncs + 1
        try:
            self.store.log.sync()
        except DiskFailed:
            self.restart(self.disk.after_power_cut(None), power=True)

    @rule()
    @survives
    def stop(self) -> None:
        self.settle_all()
        recovery.closed(DATA, self.disk)
        self.store.close()
        self.restart(self.disk.after_power_cut(None))

    @rule(share=st.floats(0, 1))
    @survives
    def cut_log(self, share: float) -> None:
        self.settle_all()
        log = self.store.log
        if not log.segments:
            return
        ends = [log.start_position, *(entry.end for entry in log.entries(log.start_position))]
        self.store.close()
        capacity, self.disk.capacity_bytes = self.disk.capacity_bytes, None
        self.disk.cut_at = None  # whoever is interrupted in it cuts again
        self.cutting = True
        cut(LOG, ends[int((len(ends) - 1) * share)], self.disk)
        self.disk.capacity_bytes = capacity
        self.restart(self.disk.after_kill())

    def restart(self, disk: FaultyDisk, *, power: bool = False) -> None:
        self.disk = disk
        self.boots += power
        self.latest_ms += FIRE_AHEAD_MS_MAX  # a start takes longer
        self.store = self.opened()
        self.taken = None
        lossy = self.cutting or (power and self.unsynced)
        self.cutting = False
        end = self.store.log.end_position
        if lossy:
            self.answered = [sent for sent in self.answered if sent.settled <= end]
            self.epoch += 1
            self.sequences.clear()
            # A topic whose making is lost is as one that was deleted; its id is given again.
            next_id = self.store.topics.freeze()()["next_id"]
            self.seen = {place: seen for place, seen in self.seen.items() if place[1] < next_id}
        self.checkpoint_at = min(self.checkpoint_at, end)
        unanswered, self.unanswered = self.unanswered, []
        self.check()
        for sent in unanswered if not lossy else ():
            self.again(sent)
        self.settle_all()
        self.check()

    def again(self, sent: Sent) -> None:
        """As a client does that has no answer."""
        capacity, self.disk.capacity_bytes = self.disk.capacity_bytes, None
        try:
            accepted = self.store.send(sent.batch, self.now_ms)
        except OutOfSequence:
            assert self.is_deleted(sent)
            return
        finally:
            self.disk.capacity_bytes = capacity
        stored = accepted.stored
        place = self.place(sent.place[0], stored.queue_id)
        self.unanswered.append(sent._replace(stored=stored, settled=accepted.settled, place=place))

    def check(self) -> None:
        """All that was acknowledged is there, once; nothing else is where something was seen."""
        self.latest_ms += FIRE_AHEAD_MS_MAX
        self.store.show_due(ALL_DUE_MS)
        places: dict[Place, dict[int, bytes]] = {}
        for queue in self.store.all_queues():
            found = contents(self.store, queue)
            place = self.place(*queue.key)
            places[place] = found
            bodies = Counter(found.values())
            assert not [body for body, count in bodies.items() if count > 1], queue.key
            for offset, body in found.items():
                assert self.seen.get(place, {}).get(offset, body) == body, (queue.key, offset)
            seen = [o for o in self.seen.get(place, {}) if o not in found]
            assert all(o < queue.next_offset for o in seen), "what was seen there may come again"
            progress = self.store.offsets.find(GroupQueue("g", *queue.key))
            assert progress is None or progress.offset <= queue.next_offset
        for sent in self.answered:
            if self.is_deleted(sent) or sent.stored.position < self.store.log.start_position:
                continue
            for number, body in enumerate(sent.bodies):
                offset = sent.stored.base_offset + number
                assert places[sent.place].get(offset) == body, (sent.place, offset)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.disk.cut_at = None
            if self.disk.off:
                self.restart(self.disk.after_power_cut(self.random), power=True)
            self.disk.capacity_bytes = None
            self.restart(self.disk.after_kill())


def contents(store: Store, queue: Queue) -> dict[int, bytes]:
    """The body at each offset, without what fills it up."""
    found: dict[int, bytes] = {}
    offset = queue.min_offset
    while offset < queue.max_offset:
        read = reader.read_records(store.log, queue, offset, 1_000, 1 << 20)
        records = message_pb2.RecordBatch.FromString(b"".join(read.slices)).records
        offsets = [run.offset + at for run in read.runs for at in range(run.records)]
        found |= {at: bytes(each.body) for at, each in zip(offsets, records, strict=True)}
        assert read.next_offset > offset
        offset = read.next_offset
    return found


TestStore = StoreMachine.TestCase
TestStore.settings = settings(stateful_step_count=40)
