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

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from duemq.errors import FencedTimer, InvalidArgument, TopicExists
from duemq.protocol import names
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.protocol.retry_policy import RetryPolicy
from duemq_server.broker.groups.send_back import Failure, SendBacks
from duemq_server.broker.reading import reader
from duemq_server.broker.records.timer_owners import ALIVE_MS, Service
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupQueue, Progress
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.unit.broker.batches import batch
from tests.unit.broker.leading import NOW_MS, Leader, comparable, extend, opened, save

TOPICS = ("a", "b")
GROUPS = ("g", "h")
SERVICES = tuple(Service(SERVICE_IDS_FROM + n, f"t{n}", 0, 1) for n in range(3))

topics = st.sampled_from(TOPICS)
groups = st.sampled_from(GROUPS)
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

    @rule(
        producer=st.integers(1, 3),
        topic=topics,
        queue_id=st.integers(0, 1),
        timed=st.booleans(),
        size=st.sampled_from([0, 300, 900]),
        count=st.integers(1, 9),
    )
    def send(
        self, producer: int, topic: str, queue_id: int, timed: bool, size: int, count: int
    ) -> None:
        for _ in range(count):
            self.send_one(producer, topic, queue_id, timed, size)
            self.leader.settle()

    @rule(topic=topics)
    def delete_topic(self, topic: str) -> None:
        if topic in self.leader.store.topics:
            self.leader.store.delete_topic(topic)
            self.leader.settle()

    @rule(topic=topics, queues=st.integers(2, 3))
    def create_topic(self, topic: str, queues: int) -> None:
        try:
            self.leader.store.create_topic(topic, queues)
        except TopicExists:
            return
        self.leader.settle()

    @rule(group=groups, topic=topics, share=shares, generation=st.integers(0, 5))
    def commit(self, group: str, topic: str, share: float, generation: int) -> None:
        if topic in self.leader.store.topics:
            key = GroupQueue(group, topic, 0)
            offset = self.offset(topic, share)
            self.leader.store.put_offsets(group, [(key, Progress(offset, generation))])
            self.leader.settle()

    def offset(self, topic: str, share: float) -> int:
        queue = self.leader.store.queue(topic, 0)
        return queue.min_offset + int((queue.max_offset - queue.min_offset) * share)

    @rule(group=groups, topic=topics, share=shares)
    def reset(self, group: str, topic: str, share: float) -> None:
        if topic in self.leader.store.topics:
            key = GroupQueue(group, topic, 0)
            self.leader.store.reset_offsets(group, [(key, self.offset(topic, share))])
            self.leader.settle()

    @rule(topic=topics, share=shares)
    def purge(self, topic: str, share: float) -> None:
        if topic in self.leader.store.topics:
            self.leader.store.purge(topic, {0: self.offset(topic, share)})
            self.leader.settle()

    @rule(group=groups, topic=topics, share=shares, dead=st.booleans())
    def send_back(self, group: str, topic: str, share: float, dead: bool) -> None:
        store = self.leader.store
        if topic not in store.topics:
            return
        queue, offset = store.queue(topic, 0), self.offset(topic, share)
        if not queue.min_offset <= offset < queue.max_offset:
            return
        records = reader.read_each(store.log, [(queue, offset)], 1 << 20)
        failure = Failure(GroupQueue(group, topic, 0), offset, dead_letter=dead)
        SendBacks(store, "b1").store(group, [failure], records, self.now_ms)
        self.leader.settle()

    @rule(group=groups)
    def mark_resent(self, group: str) -> None:
        dead = names.dead_letter_topic(group)
        if dead in self.leader.store.topics:
            queue = self.leader.store.queue(dead, 0)
            some = [each for each in range(queue.min_offset, queue.max_offset) if each % 3]
            self.leader.store.mark_resent(group, 0, some)
            self.leader.settle()

    @rule(group=groups, retries_max=st.integers(1, 3))
    def put_group(self, group: str, retries_max: int) -> None:
        self.leader.store.put_group(GroupConfig(group, RetryPolicy(retries_max)))
        self.leader.settle()

    @rule(group=groups)
    def delete_group(self, group: str) -> None:
        if self.leader.store.knows_group(group):
            self.leader.store.delete_group(group)
            self.leader.settle()

    @rule(
        group=groups,
        kept=st.one_of(st.none(), st.integers(0, 3).map('{{"generation": {}}}'.format)),
    )
    def put_membership(self, group: str, kept: str | None) -> None:
        self.leader.store.put_membership(group, kept)
        self.leader.settle()

    @rule(service=st.sampled_from(SERVICES), queues=st.lists(st.integers(0, 1), min_size=1))
    def claim(self, service: Service, queues: list[int]) -> None:
        self.now_ms += ALIVE_MS
        try:
            self.leader.store.claim_timer_queues(service, sorted(set(queues)), self.now_ms)
        except FencedTimer:
            return
        self.leader.settle()

    @rule(service=st.sampled_from(SERVICES))
    def release(self, service: Service) -> None:
        self.now_ms += 2 * ALIVE_MS
        try:
            self.leader.store.release_timer_queues(service.id, self.now_ms)
        except InvalidArgument:
            return
        self.leader.settle()

    @rule(service=st.sampled_from(SERVICES), topic=topics, count=st.integers(1, 10))
    def fire(self, service: Service, topic: str, count: int) -> None:
        store = self.leader.store
        if store.timer_owners.knows(service.id) and topic in store.topics:
            for _ in range(count):
                self.send_one(service.id, topic, 0, False, 10)
                self.leader.settle()

    @rule()
    def take_checkpoint(self) -> None:
        self.taken = self.leader.store.snapshot()

    @rule()
    def save_checkpoint(self) -> None:
        taken, self.taken = self.taken or self.leader.store.snapshot(), None
        save(self.leader.store, taken, self.leader.disk)
        self.saved_at, self.saved_end = taken.position, self.leader.log.end_position

    @rule(share=shares)
    def retain(self, share: float) -> None:
        upto = self.saved_at * share
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
            self.standby.check_truncate(end)
            self.survive(lambda: self.standby.log.truncate(end))

    # -- the follower -----------------------------------------------------------------------------

    def survive(self, step: Callable[[], None]) -> None:
        """Unless the power fails."""
        try:
            step()
        except PowerCut:
            self.reopen(self.disk.after_power_cut(self.random))
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
        self.survive(lambda: self.standby.drop_before(self.leader.log.start_position))

    @precondition(lambda self: self.saved_at)
    @rule()
    def install(self) -> None:
        """Needed or not."""
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


TestStandby = StandbyMachine.TestCase
TestStandby.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
