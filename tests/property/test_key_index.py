"""Whatever happens to a queue and to the runs of its key index: look-ups find what was stored."""

from contextlib import ExitStack
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duemq.v1 import message_pb2
from duemq_server.broker.reading import lookup
from duemq_server.broker.reading.lookup import LookupStart
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.indexes import consume_queue
from duemq_server.storage.indexes.index import FixedIndex
from duemq_server.storage.tools.cut import cut
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.reading.test_lookup import (
    COLLIDING,
    KEYS,
    Stored,
    batch_of,
    by_key,
    filled,
    record_of,
    settle,
    walk,
)
from tests.unit.broker.short_spans import DATA, SPAN, runs_of, save, short_spans

QUEUES = 2
STORE_SETTINGS = StoreSettings(default_queues=QUEUES, timer_queues=1)
TOPIC = "orders"


class KeyIndexModel(RuleBasedStateMachine):
    """`stored`: what was stored, by queue, and is not lost; of it is there what the queue keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.patches.enter_context(short_spans())
        # Files of the consume queues are as short.
        few = {"files": None, "file_bytes": SPAN * consume_queue.ENTRY_BYTES}
        self.patches.enter_context(mock.patch.object(FixedIndex.__init__, "__kwdefaults__", few))
        self.disk = FaultyDisk()
        self.now_ms = 1_000

    def teardown(self) -> None:
        self.patches.close()

    @initialize()
    def open(self) -> None:
        self.store = self.opened()
        self.make_topic()

    def opened(self) -> Store:
        return recovery.open_store(DATA, self.disk, STORE_SETTINGS, segment_bytes=1 << 15).store

    def make_topic(self) -> None:
        self.store.create_topic(TOPIC, QUEUES)
        self.stored: list[list[Stored]] = [[] for _ in range(QUEUES)]
        settle(self.store)

    @rule(
        queue_id=st.integers(0, QUEUES - 1),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3 * SPAN),
    )
    def send(self, queue_id: int, keys: list[str]) -> None:
        self.now_ms += 1
        records = [message_pb2.Record(key=key, body=bytes(1_000)) for key in keys]
        base = self.store.send(batch_of(queue_id, records), self.now_ms).stored.base_offset
        self.stored[queue_id] += [
            Stored(queue_id, base + number, self.now_ms, record)
            for number, record in enumerate(records)
        ]
        settle(self.store)

    @rule()
    def checkpoint(self) -> None:
        save(self.store, self.disk)
        for queue in self.store.queues_of(TOPIC):
            assert queue.keys.missing(queue.min_offset, queue.max_offset) == 0

    @rule()
    def kill(self) -> None:
        self.disk = self.disk.after_kill()
        self.store = self.opened()

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        runs = [path for path in runs_of(self.disk, TOPIC) if self.disk.content(path)]
        if not runs:
            return
        path = data.draw(st.sampled_from(runs))
        size = len(self.disk.content(path))
        if data.draw(st.booleans()):
            self.disk.chop(path, data.draw(st.integers(0, size - 1)))
        else:
            self.disk.flip(path, data.draw(st.integers(0, size - 1)))

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        self.checkpoint()
        position = data.draw(st.sampled_from(self.store.log.segments)).start
        self.store.tables.drop_before(position)
        self.store.log.delete_before(position)

    @rule(queue_id=st.integers(0, QUEUES - 1), share=st.floats(0, 1), killed=st.booleans())
    def purge(self, queue_id: int, share: float, killed: bool) -> None:
        queue = self.store.queue(TOPIC, queue_id)
        offset = queue.min_offset + int(share * (queue.max_offset - queue.min_offset))
        left = [each for each in self.there()[queue_id] if each.offset >= offset]
        offset_changes.purge(self.store, TOPIC, {queue_id: offset})
        settle(self.store)
        if killed:
            self.kill()
        assert self.there()[queue_id] == left

    @rule(data=st.data())
    def lose_the_end(self, data: st.DataObject) -> None:
        """All that came with a message or later is cut off the log."""
        kept = [each for queue in self.there() for each in queue]
        if not kept:
            return
        first = data.draw(st.sampled_from(kept))
        queues = self.store.queues_of(TOPIC)
        position = queues[first.queue_id].frame_at(first.offset)
        for queue, stored in zip(queues, self.stored, strict=True):
            stored[:] = [
                each
                for each in stored
                if each.offset < queue.min_offset or queue.frame_at(each.offset) < position
            ]
        self.store.close()
        cut(f"{DATA}/{recovery.LOG_DIRECTORY}", position, self.disk)
        self.disk = self.disk.after_kill()
        self.store = self.opened()

    @rule()
    def make_anew(self) -> None:
        self.store.delete_topic(TOPIC)
        self.make_topic()

    @rule()
    def lose_the_checkpoint(self) -> None:
        if self.store.log.start_position == 0:  # else it cannot be told how many queues there were
            self.disk = self.disk.after_kill()
            if self.disk.exists(f"{DATA}/{recovery.CHECKPOINT}"):
                self.disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")
            self.store = self.opened()
            assert not runs_of(self.disk, TOPIC)

    def there(self) -> list[list[Stored]]:
        return [
            [each for each in stored if each.offset >= queue.min_offset]
            for queue, stored in zip(self.store.queues_of(TOPIC), self.stored, strict=True)
        ]

    @invariant()
    def look_ups_find_what_is_there(self) -> None:
        there = self.there()
        for key in KEYS[1:]:
            for size in (1, 100):
                wanted = [each for queue in there for each in queue if each.record.key == key]
                assert walk(self.store, by_key(key), records_max=size) == wanted

    @invariant()
    def a_start_leaves_no_run_of_what_is_gone(self) -> None:
        for queue in self.store.queues_of(TOPIC):
            assert len(queue.keys) <= queue.max_offset // SPAN - queue.min_offset // SPAN


KeyIndexModel.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
test_key_index = KeyIndexModel.TestCase


@given(
    st.lists(
        st.tuples(
            st.just(0),
            st.integers(0, 2),
            st.lists(st.tuples(st.sampled_from(KEYS), st.just(10)), min_size=1, max_size=20),
        ),
        max_size=8,
    ),
    st.integers(999, 1_020),
    st.integers(999, 1_020),
    st.integers(1, 5),
    st.sampled_from([1, SPAN, lookup.ENTRIES_MAX]),
)
def test_with_runs_and_without_them_alike(batches, from_ms, to_ms, records_max, entries) -> None:
    """Also a cursor from before there were runs goes on where it stopped."""
    disk = FaultyDisk()
    query = by_key(COLLIDING[0], from_ms=from_ms, to_ms=to_ms)
    with short_spans():
        store, _ = filled(batches, disk)
        without = walk(store, query, records_max, entries=entries)
        queues = store.queues_of("orders")
        first = lookup.search(store.log, queues, query, LookupStart(0, 0), 1, entries=entries)
        save(store, disk)
        assert walk(store, query, records_max, entries=entries) == without
    found, place = first
    while place is not None:
        more, place = lookup.search(store.log, queues, query, place, 1, entries=entries)
        found = found + more
    assert [(each.offset, record_of(each.entry)) for each in found] == [
        (each.offset, each.record) for each in without
    ]


@pytest.mark.parametrize("records_max", [1, 100])
def test_a_key_on_both_sides_of_what_the_log_has_lost_is_found(records_max: int) -> None:
    disk = FaultyDisk()
    with short_spans():
        store, _ = filled([(0, 1, [("a", 1)])] * 3, disk)
        last = store.queue(TOPIC, 0).frame_at(2)
        save(store, disk)
        store.close()
        cut(f"{DATA}/{recovery.LOG_DIRECTORY}", last, disk)
        store = recovery.open_store(DATA, disk, STORE_SETTINGS, segment_bytes=1 << 16).store
        sent = store.send(batch_of(0, [message_pb2.Record(key="a")] * 2 * SPAN), 2_000).stored
        assert 2 < sent.base_offset < SPAN - 1
        settle(store)
        without = [each.offset for each in walk(store, by_key("a"), records_max)]
        assert without == [0, 1, *range(sent.base_offset, sent.base_offset + 2 * SPAN)]
        save(store, disk)
        assert runs_of(disk, TOPIC)
        assert [each.offset for each in walk(store, by_key("a"), records_max)] == without


def test_with_runs_little_of_the_queue_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk()
    with short_spans():
        store, stored = filled([(0, 1, [("a", 1)] * 3 * SPAN), (0, 1, [("plumless", 1)])], disk)
        store.send(batch_of(0, [message_pb2.Record()] * SPAN), 2_000)
        settle(store)
        save(store, disk)
    read: list[tuple[int, int]] = []
    page = Queue.page

    def noted(self: Queue, offset: int, count: int) -> memoryview:
        read.append((offset, count))
        return page(self, offset, count)

    monkeypatch.setattr(Queue, "page", noted)
    assert walk(store, by_key("plumless")) == stored[-1:]
    assert read == [(3 * SPAN, 1), (4 * SPAN, 1)]  # what was found, and the tail without a run
