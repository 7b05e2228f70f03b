"""Random lives of a leader's store, and of a follower that gets its log in pieces.

Wherever the follower has applied the leader's log up to, its tables are what the leader's were
there: over restarts, power cuts, snapshots, retention, other leaders and what they truncate.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from duemq.errors import FencedTimer, InvalidArgument
from duemq.protocol import names
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.protocol.retry_policy import RetryPolicy
from duemq_server.broker.groups.send_back import FailedMessage, SendBacks
from duemq_server.broker.reading import reader
from duemq_server.broker.records.timer_claims import Service
from duemq_server.broker.records.timer_owners import ALIVE_MS
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import group_changes, offset_changes, timer_queue_changes
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.storage.indexes.consume_queue import ENTRY_BYTES
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.unit.broker.batches import batch
from tests.unit.broker.leading import (
    DATA,
    NOW_MS,
    SEGMENT_BYTES,
    SETTINGS,
    Leader,
    comparable,
    extend,
    opened,
    save,
)

TOPICS = ("a", "b")
GROUPS = ("g", "h")
SERVICES = (
    *(Service(SERVICE_IDS_FROM + n, f"t{n}", 0, 1) for n in range(3)),
    Service(SERVICE_IDS_FROM, "t0", 0, 2, 1),  # as the first one, when there are two shards
    *(Service(SERVICE_IDS_FROM + 3, "t3", 1, shards, 1) for shards in (1, 2)),
)

WORKS = (
    *("send", "send", "send", "delete_topic", "commit", "reset", "purge", "send_back", "send_back"),
    *("mark_resent", "put_group", "delete_group", "put_membership", "claim", "release", "fire"),
    *("take_checkpoint", "save_checkpoint", "retain"),
)

shares = st.floats(0, 1)


class StandbyMachine(RuleBasedStateMachine):
    """`compare_from`: a snapshot leaves out the topics that were deleted before it was saved."""

    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_ms = NOW_MS
        self.leader = Leader()
        self.taken: CheckpointState | None = None
        self.saved_at = 0
        self.saved_end = 0
        self.epoch = 0
        self.sequences: Counter[tuple[int, str, int, bool]] = Counter()
        self.disk = FaultyDisk()
        self.standby = opened(self.disk)
        self.compare_from = 0

    # -- the leader -------------------------------------------------------------------------------

    def send_one(self, producer: int, topic: str, queue_id: int, timed: bool, size: int) -> None:
        lane = (producer, topic, queue_id, timed)
        due = {"delays_ms": struct.pack("<q", 5)} if timed else {}
        self.now_ms += 1
        self.leader.store.send(
            batch(
                [bytes(size)],
                topic=topic,
                queue_id=queue_id,
                producer_id=producer,
                producer_epoch=self.epoch,
                sequence=self.sequences[lane],
                **due,
            ),
            self.now_ms,
        )
        self.sequences[lane] += 1

    @rule(works=st.lists(st.sampled_from(WORKS), min_size=1, max_size=8))
    def work(self, works: list[str]) -> None:
        for name in works:
            getattr(self, name)()
            self.leader.settle()

    def send(self) -> None:
        producer, timed = self.random.randint(1, 3), self.random.random() < 0.3
        topic, queue_id = self.topic(), self.random.randint(0, 1)
        for _ in range(self.random.randint(1, 9)):
            self.send_one(producer, topic, queue_id, timed, self.random.choice((0, 300, 900)))
            self.leader.settle()

    def topic(self) -> str:
        return self.random.choice(TOPICS)

    def group(self) -> str:
        return self.random.choice(GROUPS)

    def a_topic_that_is_there(self) -> str:
        topic = self.topic()
        if topic not in self.leader.store.topics:
            self.leader.store.create_topic(topic, self.random.randint(2, 3))
            self.leader.settle()
        return topic

    def delete_topic(self) -> None:
        self.leader.store.delete_topic(self.a_topic_that_is_there())

    def offset(self, topic: str) -> int:
        queue = self.leader.store.queue(topic, 0)
        return self.random.randint(queue.min_offset, queue.max_offset)

    def commit(self) -> None:
        group, topic = self.group(), self.a_topic_that_is_there()
        change = (
            GroupQueue(group, topic, 0),
            GroupOffset(self.offset(topic), self.random.randint(0, 5)),
        )
        last = GroupQueue(group, topic, self.leader.store.topics.find(topic).queues - 1)
        changes = [change, (last, GroupOffset(0, 0))] if last.queue_id > 1 else [change]
        offset_changes.put(self.leader.store, group, changes)

    def reset(self) -> None:
        group, topic = self.group(), self.a_topic_that_is_there()
        key = GroupQueue(group, topic, 0)
        offset_changes.reset(self.leader.store, group, [(key, self.offset(topic))])

    def purge(self) -> None:
        topic = self.a_topic_that_is_there()
        offset_changes.purge(self.leader.store, topic, {0: self.offset(topic)})

    def send_back(self) -> None:
        group, topic, store = self.group(), self.a_topic_that_is_there(), self.leader.store
        queue, offset = store.queue(topic, 0), self.offset(topic)
        if offset < queue.max_offset:
            records = reader.read_each(store.log, [(queue, offset)], 1 << 20)
            dead = self.random.random() < 0.5
            failure = FailedMessage(GroupQueue(group, topic, 0), offset, dead_letter=dead)
            SendBacks(store, "b1").store(group, [failure], records, self.now_ms)

    def mark_resent(self) -> None:
        group = self.group()
        dead = names.dead_letter_topic(group)
        if dead in self.leader.store.topics:
            queue = self.leader.store.queue(dead, 0)
            some = [each for each in range(queue.min_offset, queue.max_offset) if each % 3]
            offset_changes.mark_resent(self.leader.store, group, 0, some)

    def put_group(self) -> None:
        policy = RetryPolicy(self.random.randint(1, 3))
        group_changes.put(self.leader.store, GroupConfig(self.group(), policy))

    def delete_group(self) -> None:
        group = self.group()
        if group_changes.knows(self.leader.store, group):
            group_changes.delete(self.leader.store, group)

    def put_membership(self) -> None:
        kept = self.random.choice((None, '{"generation": 1}', '{"generation": 2}'))
        group_changes.put_membership(self.leader.store, self.group(), kept)

    def claim(self) -> None:
        self.now_ms += ALIVE_MS
        service = self.random.choice(SERVICES)
        queues = filter(service.has, self.random.choice(([0], [1], [0, 1])))
        ends = {queue: self.random.randrange(9) for queue in (0, 1)}
        with suppress(FencedTimer):
            timer_queue_changes.claim(
                self.leader.store, service, list(queues), self.now_ms, ends, now_ms=NOW_MS
            )

    def release(self) -> None:
        self.now_ms += 2 * ALIVE_MS
        with suppress(InvalidArgument):
            service = self.random.choice(SERVICES)
            timer_queue_changes.release(self.leader.store, service.id, self.now_ms)

    def fire(self) -> None:
        service, topic = self.random.choice(SERVICES), self.a_topic_that_is_there()
        if self.leader.store.timer_owners.knows(service.id):
            for _ in range(10):
                self.send_one(service.id, topic, 0, False, 10)
                self.leader.settle()

    def take_checkpoint(self) -> None:
        self.taken = self.leader.store.freeze()()

    def save_checkpoint(self) -> None:
        taken, self.taken = self.taken or self.leader.store.freeze()(), None
        save(self.leader.store, taken, self.leader.disk)
        self.saved_at, self.saved_end = taken.position, self.leader.log.end_position

    def retain(self) -> None:
        upto = self.saved_at * self.random.choice((0.3, 0.7, 1))
        starts = [s.start for s in self.leader.log.segments if s.start <= upto]
        if starts:
            self.leader.retain(starts[-1])

    @rule()
    def next_epoch(self) -> None:
        self.taken = None
        self.leader.again()

    @rule(numbers=st.lists(st.integers(1, 3), min_size=1, max_size=9), got=shares)
    def overtake(self, numbers: list[int], got: float) -> None:
        """What the old leader wrote last was committed by nobody."""
        self.be_close()
        end = self.leader.committed
        for producer in numbers:
            self.send_one(producer, "a", 0, False, 200)
        self.leader.write()
        written = self.leader.log.written_position
        self.survive(lambda: self.follow(end + int((written - end) * got)))
        self.survive(lambda: self.standby.apply(end))
        self.taken = None
        self.epoch += 1
        self.sequences.clear()
        self.leader.overtaken(end)
        while self.standby.log.end_position > end:
            assert self.standby.applied <= end
            self.survive(lambda: self.standby.log.truncate(end))

    # -- the follower -----------------------------------------------------------------------------

    def survive(self, step: Callable[[], None]) -> None:
        """Unless the power fails."""
        try:
            step()
        except PowerCut:  # or a kill
            killed = self.random.random() < 0.3
            after = self.disk.after_kill() if killed else self.disk.after_power_cut(self.random)
            self.reopen(after)
        self.check()

    def be_close(self) -> None:
        """The leader's log has what comes next."""
        while self.standby.log.end_position < self.leader.log.start_position:
            self.install()

    def follow(self, position: int) -> None:
        extend(self.standby, self.leader.log, position)

    @rule(share=shares)
    def get(self, share: float) -> None:
        self.be_close()
        position, end = self.standby.log.end_position, self.leader.log.end_position
        self.survive(lambda: self.follow(position + int((end - position) * share)))

    @rule(share=shares, entries_max=st.none() | st.integers(1, 5))
    def apply(self, share: float, entries_max: int | None) -> None:
        position = self.standby.applied
        end = min(self.leader.committed, self.standby.log.end_position)
        goal = position + int((end - position) * share)
        self.survive(lambda: self.standby.apply(goal, entries_max))

    @rule()
    def catch_up(self) -> None:
        self.be_close()
        self.survive(lambda: self.follow(self.leader.log.end_position))
        self.survive(lambda: self.standby.apply(self.leader.committed))

    @rule()
    def is_caught_up(self) -> None:
        with suppress(ValueError):  # its entries claim more
            self.survive(self.standby.log.caught_up)

    @rule()
    def checkpoint(self) -> None:
        self.survive(self.standby.checkpoint)

    @rule()
    def drop(self) -> None:
        self.survive(lambda: self.standby.drop_before(self.leader.log.start_position))

    @precondition(lambda self: self.saved_at)
    @rule(cut_after=st.none() | st.integers(1, 30), share=shares)
    def install_now(self, cut_after: int | None, share: float) -> None:
        """Whether it is needed or not; then some of the log comes."""
        if cut_after is not None:
            self.power_will_fail(cut_after)
        self.install()
        self.get(share)

    def install(self) -> None:
        snapshot, start = self.leader.snapshot, self.leader.log.start_position
        self.compare_from = max(self.compare_from, self.saved_end)
        self.survive(lambda: self.standby.install(snapshot, start))

    @rule(after=st.integers(1, 25))
    def power_will_fail(self, after: int) -> None:
        self.disk.cut_at = self.disk.operations + after

    @rule()
    def kill(self) -> None:
        self.reopen(self.disk.after_kill())

    @rule(seed=st.none() | st.integers(0, 1 << 32))
    def fail_power(self, seed: int | None) -> None:
        self.reopen(self.disk.after_power_cut(None if seed is None else Random(seed)))

    def reopen(self, disk: FaultyDisk) -> None:
        disk.cut_at = self.random.choice((None, self.random.randint(1, 60)))
        while True:
            try:
                self.standby = opened(disk)
                break
            except PowerCut:
                disk = disk.after_power_cut(self.random)
        disk.cut_at = None
        self.disk = disk
        assert not self.standby.lost
        assert self.standby.applied == self.standby.committed <= self.leader.committed
        assert self.standby.log.start_position <= self.standby.applied
        self.check()

    def check(self) -> None:
        standby, leader = self.standby, self.leader
        if standby.applied < self.compare_from or not standby.is_whole:
            return
        expected = leader.ends.get(standby.applied)
        if expected is not None:
            assert comparable(standby.tables) == expected
        if standby.applied == leader.log.end_position:
            self.check_queues()

    def check_queues(self) -> None:
        for queue in self.leader.store.all_queues():
            mine = self.standby.tables.queues.of(queue.topic)[queue.queue_id]
            assert mine.max_offset == queue.max_offset
            first = max(mine.min_offset, queue.min_offset)
            assert mine.page(first, 1_000) == queue.page(first, 1_000)

    def teardown(self) -> None:
        if not hasattr(self, "standby"):
            return
        if self.disk.off:
            self.reopen(self.disk.after_power_cut(None))
        self.disk.cut_at = None
        self.catch_up()
        assert self.standby.applied == self.leader.committed
        self.standby.checkpoint()
        self.reopen(self.disk.after_power_cut(None))
        assert self.standby.applied == self.leader.committed
        store = self.standby.promote().store
        assert comparable(store.tables) == self.leader.ends[self.leader.committed]

    def check_without_a_checkpoint(self) -> None:
        """Of the leader: all that the log still has is there, whatever retention has removed."""
        pages = {
            queue.key: (queue.min_offset, bytes(queue.page(queue.min_offset, 1_000)))
            for queue in self.leader.store.all_queues()
        }
        disk = self.leader.disk.after_kill()
        if disk.exists(path := f"{DATA}/{recovery.CHECKPOINT}"):
            disk.unlink(path)
        again = recovery.open_store(DATA, disk, SETTINGS, segment_bytes=SEGMENT_BYTES).store
        for key, (first, page) in pages.items():
            if page or key in {queue.key for queue in again.all_queues()}:
                queue = again.queue(*key)
                begin = max(first, queue.min_offset)
                assert page[(begin - first) * ENTRY_BYTES :] == queue.page(begin, 1_000)
                assert not page or queue.min_offset <= first
        assert {queue.topic for queue in again.all_queues()} <= {topic for topic, _ in pages}
        for group in again.offsets.groups():
            for topic, queue_id, progress in again.offsets.of_group(group):
                known = self.leader.store.offsets.find(GroupQueue(group, topic, queue_id))
                assert known == progress
                assert queue_id < again.topics.find(topic).queues


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(40, 120))
def test_what_is_left_of_a_log_makes_a_store_without_a_checkpoint(seed: int, steps: int) -> None:
    life = StandbyMachine()
    life.begin(seed)
    for _ in range(steps):
        life.work([life.random.choice(WORKS)])
    life.check_without_a_checkpoint()


TestStandby = StandbyMachine.TestCase
TestStandby.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
