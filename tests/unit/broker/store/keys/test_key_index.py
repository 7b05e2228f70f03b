"""What is planned and built of the key index, and a run that is sound but wrong."""

from collections.abc import Iterator

import numpy as np
import pytest

from duemq.protocol.record_bytes import text_hash
from duemq_server.broker.store.keys import key_builder
from duemq_server.broker.store.keys.key_builder import TEMPORARY, KeyBuilder
from duemq_server.broker.store.store import Store
from duemq_server.storage.errors import DiskFailed
from duemq_server.storage.indexes import key_run
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.reading.test_lookup import by_key, filled, walk
from tests.unit.broker.short_spans import DATA, SPAN, short_spans

TOPIC = "orders"


@pytest.fixture(autouse=True)
def _short_spans() -> Iterator[None]:
    with short_spans():
        yield


def stored(disk: FaultyDisk, spans: int, key: str = "a") -> Store:
    store, _ = filled([(0, 1, [(key, 10)] * SPAN)] * spans, disk)
    return store


def planned(store: Store, end: int) -> list[int]:
    plan = KeyBuilder.plan(store.queues_of(TOPIC), {TOPIC: [end]})
    return [span.base // SPAN for span in plan.spans]


def test_whole_spans_of_the_checkpoint_are_planned_the_newest_first() -> None:
    store = stored(FaultyDisk(), 5)
    assert planned(store, 3 * SPAN - 1) == [1, 0]
    assert planned(store, 3 * SPAN) == [2, 1, 0]
    assert planned(store, SPAN - 1) == planned(store, 0) == []
    assert KeyBuilder.plan(store.queues_of(TOPIC), {}).missing == 0


def test_what_is_hidden_is_not_planned_yet() -> None:
    store = stored(FaultyDisk(), 2)
    [queue, _] = store.queues_of(TOPIC)
    store.hidden.hide(queue, 2 * SPAN - 1, [(0, 1)])
    assert planned(store, 2 * SPAN) == [0]
    store.show_due(1)
    assert planned(store, 2 * SPAN) == [1, 0]


def test_what_is_built_is_not_planned_again() -> None:
    disk = FaultyDisk()
    store = stored(disk, 3)
    builder = KeyBuilder(DATA, disk)
    plan = builder.plan(store.queues_of(TOPIC), {TOPIC: [3 * SPAN]})
    assert (plan.built, plan.missing) == (0, 3)
    assert builder.build(plan.spans[1])
    assert planned(store, 3 * SPAN) == [2, 0]
    after = builder.plan(store.queues_of(TOPIC), {TOPIC: [3 * SPAN]})
    assert (after.built, after.missing) == (1, 2)


def test_a_plan_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_builder, "PLANNED_MAX", 2)
    plan = KeyBuilder.plan(stored(FaultyDisk(), 5).queues_of(TOPIC), {TOPIC: [5 * SPAN]})
    assert ([span.base // SPAN for span in plan.spans], plan.missing) == ([4, 3], 5)


def test_a_span_without_keys_has_a_header_only() -> None:
    disk = FaultyDisk()
    store = stored(disk, 1, key="")
    builder = KeyBuilder(DATA, disk)
    [span] = builder.plan(store.queues_of(TOPIC), {TOPIC: [SPAN]}).spans
    assert builder.build(span)
    [path] = [path for path in disk.paths if path.endswith(key_run.SUFFIX)]
    assert len(disk.content(path)) == key_run.HEADER.size


def test_a_start_removes_what_was_half_written() -> None:
    disk = FaultyDisk()
    stored(disk, 1)
    disk.open(f"{DATA}/{TEMPORARY}", create=True)
    KeyBuilder(DATA, disk)
    assert f"{DATA}/{TEMPORARY}" not in disk.paths


def test_a_run_that_says_what_the_queue_does_not_say_is_removed() -> None:
    disk = FaultyDisk()
    store = stored(disk, 1)
    [queue, _] = store.queues_of(TOPIC)
    other = np.full(SPAN, text_hash(b"plumless"), np.uint32)
    run = key_run.encode(0, SPAN, [key_run.entries_of(other, 0)])
    key_run.write(f"{DATA}/{TEMPORARY}", run, disk)
    assert queue.keys.adopt(0, f"{DATA}/{TEMPORARY}", 0)
    assert walk(store, by_key("plumless")) == []
    assert len(queue.keys) == 0
    assert len(walk(store, by_key("a"))) == SPAN


def test_the_folder_of_a_deleted_topic_is_touched_no_more() -> None:
    disk = FaultyDisk()
    store = stored(disk, 2)
    [queue, _] = store.queues_of(TOPIC)
    builder = KeyBuilder(DATA, disk)
    first, second = builder.plan([queue], {TOPIC: [2 * SPAN]}).spans
    assert builder.build(first)
    queue.drop()
    before = disk.paths
    assert not builder.build(second)
    queue.keys.discard(first.base)
    queue.keys.drop_before(2 * SPAN)
    assert disk.paths == before


def test_runs_that_were_dropped_go_when_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk()
    store = stored(disk, 2)
    [queue, _] = store.queues_of(TOPIC)
    builder = KeyBuilder(DATA, disk)
    for each in builder.plan([queue], {TOPIC: [2 * SPAN]}).spans:
        assert builder.build(each)
    before = len(disk.paths)
    queue.keys.drop_before(2 * SPAN)
    assert len(queue.keys) == 0
    assert len(disk.paths) == before

    def unlink(path: str) -> None:
        raise DiskFailed(f"remove {path}: input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "unlink", unlink)
        with pytest.raises(DiskFailed):
            queue.keys.remove_dropped()
    queue.keys.remove_dropped()
    assert len(disk.paths) == before - 2
