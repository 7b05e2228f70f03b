"""What groups send back, commit and are moved to, against plain sets, with starts in between."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duemq.protocol import names
from duemq.protocol.names import TIMER_TOPIC
from duemq.protocol.retry_policy import RetryPolicy
from duemq_server.broker.groups.progress import retries_waiting
from duemq_server.broker.groups.send_back import FailedMessage, SendBacks, SentBack
from duemq_server.broker.reading import reader
from duemq_server.broker.records import retry_record
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import group_changes, offset_changes
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage import frame
from tests.crash.faulty_disk import FaultyDisk
from tests.crash.test_store_power_cut import save, settle
from tests.unit.broker.batches import batch

DATA = "/data"
STORE_SETTINGS = StoreSettings(default_queues=2, timer_queues=2)
NOW_MS = 1_000
MESSAGES = 12
GROUPS = ("a", "b")
TOPICS = ("orders", "bills")

groups = st.sampled_from(GROUPS)
topics = st.sampled_from(TOPICS)
offsets = st.integers(0, MESSAGES - 1)
Place = tuple[str, int]
"""Topic, offset."""


class Model:
    """One group, in plain types."""

    def __init__(self) -> None:
        self.progress: dict[str, GroupOffset] = {}
        self.settled: set[Place] = set()
        self.retries = 0
        self.retries_max = 16

    def done(self, topic: str, offset: int) -> bool:
        known = self.progress.get(topic)
        return (topic, offset) in self.settled or (known is not None and offset < known.offset)

    def move(self, topic: str, progress: GroupOffset) -> None:
        self.progress[topic] = progress
        self.settled = {
            (name, offset)
            for name, offset in self.settled
            if name != topic or offset >= progress.offset
        }

    def forget(self, topic: str) -> None:
        self.progress.pop(topic, None)
        self.settled = {place for place in self.settled if place[0] != topic}


class SendBackMachine(RuleBasedStateMachine):
    """`there` counts what lies in %TIMER% and the dead letters, by group and place."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = FaultyDisk()
        self.models = {group: Model() for group in GROUPS}
        self.there: Counter[tuple[str, str, int]] = Counter()
        self.store: Store
        self.start()
        for topic in TOPICS:
            self.fill(topic)

    def start(self) -> None:
        self.store = recovery.open_store(DATA, self.disk, STORE_SETTINGS, segment_bytes=4_096).store
        settle(self.store)

    def fill(self, topic: str) -> None:
        self.store.send(batch([b"%d" % n for n in range(MESSAGES)], topic=topic), NOW_MS)
        settle(self.store)

    @rule(group=groups, topic=topics, at=st.lists(offsets, min_size=1), dead=st.booleans())
    def send_back(self, group: str, topic: str, at: list[int], dead: bool) -> None:
        key, model = GroupQueue(group, topic, 0), self.models[group]
        queue = self.store.queue(topic, 0)
        records = reader.read_each(self.store.log, [(queue, offset) for offset in at], 1 << 20)
        failures = [FailedMessage(key, offset, dead_letter=dead) for offset in at]
        outcomes, _ = SendBacks(self.store, "b1").store(group, failures, records, NOW_MS)
        settle(self.store)
        for offset, outcome in zip(at, outcomes, strict=True):
            assert isinstance(outcome, SentBack)
            assert outcome.duplicate == model.done(topic, offset)
            if outcome.duplicate:
                continue
            assert outcome.dead_letter == (dead or not model.retries_max)
            model.settled.add((topic, offset))
            model.retries += not outcome.dead_letter
            self.there[group, topic, offset] += 1

    @rule(group=groups, topic=topics, offset=st.integers(0, MESSAGES), generation=st.integers(0, 9))
    def commit(self, group: str, topic: str, offset: int, generation: int) -> None:
        key, model = GroupQueue(group, topic, 0), self.models[group]
        known = model.progress.get(topic)
        fence = max(generation, known.generation if known else 0)
        offset_changes.put(self.store, group, [(key, GroupOffset(offset, fence))])
        model.move(topic, GroupOffset(offset, fence))

    @rule(group=groups, topic=topics, offset=st.integers(0, MESSAGES))
    def reset(self, group: str, topic: str, offset: int) -> None:
        model = self.models[group]
        known = model.progress.get(topic)
        offset_changes.reset(self.store, group, [(GroupQueue(group, topic, 0), offset)])
        model.forget(topic)
        model.move(topic, GroupOffset(offset, known.generation + 1 if known else 0))

    @rule(group=groups, retries_max=st.integers(0, 3))
    def put_group(self, group: str, retries_max: int) -> None:
        group_changes.put(self.store, GroupConfig(group, RetryPolicy(retries_max)))
        self.models[group].retries_max = retries_max

    @rule(group=groups)
    def delete_group(self, group: str) -> None:
        if group_changes.knows(self.store, group):
            group_changes.delete(self.store, group)
            self.models[group] = Model()

    @rule(topic=topics)
    def make_topic_again(self, topic: str) -> None:
        self.store.delete_topic(topic)
        for model in self.models.values():
            model.forget(topic)
        self.fill(topic)

    @rule()
    def checkpoint(self) -> None:
        save(self.store, self.disk)

    @rule(without_checkpoint=st.booleans(), without_queues=st.booleans())
    def restart(self, without_checkpoint: bool, without_queues: bool) -> None:
        settle(self.store)
        for path in list(self.disk.paths):
            if without_queues and "consumequeue" in path:
                self.disk.unlink(path)
        if without_checkpoint and self.disk.exists(f"{DATA}/{recovery.CHECKPOINT}"):
            self.disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")
        self.start()

    @invariant()
    def groups_are_where_the_model_is(self) -> None:
        for group, model in self.models.items():
            for topic in TOPICS:
                key = GroupQueue(group, topic, 0)
                settled = {(topic, offset) for offset in self.store.offsets.settled(key)}
                assert settled == {place for place in model.settled if place[0] == topic}
                assert self.store.offsets.find(key) == model.progress.get(topic)
            assert self.store.groups.effective(group).retry.retries_max == model.retries_max

    @invariant()
    def everything_sent_back_is_there(self) -> None:
        settle(self.store)
        found: Counter[tuple[str, str, int]] = Counter()
        for topic in (TIMER_TOPIC, *map(names.dead_letter_topic, GROUPS)):
            for queue in self.store.queues_of(topic) if topic in self.store.topics else []:
                at = queue.min_offset
                while at < queue.max_offset:
                    each = frame.decode(self.store.log.read_entry(queue.frame_at(at)).body)
                    group = names.group_of(each.target_topic or each.topic)
                    for name, _, offset in retry_record.sources(each.payload, each.sizes):
                        found[group, name, offset] += 1
                    at = each.end_offset
        assert found == self.there

    @invariant()
    def retries_wait(self) -> None:
        for group, model in self.models.items():
            assert retries_waiting(self.store, group) == model.retries


TestSendBacks = SendBackMachine.TestCase
TestSendBacks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
