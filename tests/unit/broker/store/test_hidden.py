"""What is stored ahead of its time: on disk before, seen from then on."""

import itertools
import struct
from collections.abc import Callable

import pytest

from duemq.errors import DuemqError
from duemq.v1 import message_pb2
from duemq_server.broker.filtering.sql_filter import SqlFilter
from duemq_server.broker.reading import filtered_read, reader, time_search
from duemq_server.broker.records import refused_fires
from duemq_server.broker.store.changes import timer_queue_changes
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.topics import Topic
from duemq_server.storage.open_files import OpenFiles
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import FakeBatch, batch
from tests.unit.broker.store.test_store import (
    NOW_MS,
    TIMERS,
    fire,
    opened,
    records,
    save,
    settle,
)

AHEAD_MS = NOW_MS + 3
ANYTHING = SqlFilter("nothing IS NULL")


@pytest.fixture
def store() -> Store:
    made = opened(FaultyDisk())
    made.create_topic("orders", 2)
    settle(made)
    return made


def ahead(body: bytes = b"ahead", until_ms: int = AHEAD_MS, **fields: object) -> FakeBatch:
    return batch([body], not_before_ms=until_ms, **fields)


def ends(store: Store) -> list[int]:
    return [queue.max_offset for queue in store.queues_of("orders")]


def seen(store: Store) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    store.on_visible = lambda queue: found.append(queue.key)
    return found


def test_it_is_seen_when_its_time_comes_and_who_waits_is_told_then(store: Store) -> None:
    told = seen(store)
    accepted = store.send(ahead(), NOW_MS, due_ms=NOW_MS)
    settle(store)
    assert (ends(store), told) == ([0, 0], [])
    assert accepted.stored.store_ms == store.hidden.next_ms == AHEAD_MS
    store.show_due(AHEAD_MS - 1)
    assert (ends(store), told) == ([0, 0], [])
    store.show_due(AHEAD_MS)
    assert (ends(store), told) == ([1, 0], [("orders", 0)])
    assert b"ahead" in records(store, "orders")
    assert store.hidden.next_ms is None


def test_it_is_not_seen_before_it_is_durable_though_its_time_has_come(store: Store) -> None:
    store.send(ahead(), NOW_MS, due_ms=NOW_MS)
    store.show_due(AHEAD_MS)
    assert ends(store) == [0, 0]
    settle(store)
    assert ends(store) == [1, 0]


@pytest.mark.parametrize(("due_ms", "there"), [(AHEAD_MS, 1), (AHEAD_MS - 1, 0)])
def test_what_is_due_is_not_hidden(store: Store, due_ms: int, there: int) -> None:
    store.send(ahead(), NOW_MS, due_ms=due_ms)
    settle(store)
    assert ends(store) == [there, 0]


def test_what_is_stored_behind_it_in_its_queue_waits_as_long(store: Store) -> None:
    store.send(ahead(), NOW_MS, due_ms=NOW_MS)
    behind = store.send(batch([b"behind"]), NOW_MS + 1).stored
    elsewhere = store.send(batch([b"other"], queue_id=1), NOW_MS + 1).stored
    settle(store)
    assert ends(store) == [0, 1]
    assert (behind.store_ms, elsewhere.store_ms) == (AHEAD_MS, NOW_MS + 1)
    store.show_due(AHEAD_MS)
    assert ends(store) == [2, 1]


def test_what_waits_behind_one_due_sooner_and_one_due_later_is_stored_after_both(
    store: Store,
) -> None:
    store.send(ahead(until_ms=AHEAD_MS + 2), NOW_MS, due_ms=NOW_MS)
    store.send(ahead(), NOW_MS, due_ms=NOW_MS)
    assert store.send(batch([b"behind"]), NOW_MS).stored.store_ms == AHEAD_MS + 2


def test_those_of_one_queue_come_one_after_the_other(store: Store) -> None:
    for number, until_ms in enumerate((NOW_MS + 2, NOW_MS + 4, NOW_MS + 1, NOW_MS + 5)):
        stored = store.send(ahead(b"%d" % number, until_ms), NOW_MS, due_ms=NOW_MS).stored
    settle(store)
    assert stored.store_ms == NOW_MS + 5
    found = []
    for later_ms in range(7):
        store.show_due(NOW_MS + later_ms)
        found.append(ends(store)[0])
    assert found == [0, 0, 1, 1, 3, 4, 4]  # the third waits behind the second


def test_a_repeat_is_answered_and_hides_nothing(store: Store) -> None:
    fields = {"producer_id": 7, "producer_epoch": 1}
    first = store.send(ahead(**fields), NOW_MS, due_ms=NOW_MS).stored
    settle(store)
    store.show_due(AHEAD_MS)
    again = store.send(ahead(**fields), NOW_MS, due_ms=NOW_MS)
    assert (again.duplicate, again.stored) == (True, first)
    assert (ends(store), len(store.hidden)) == ([1, 0], 0)


def each_later(*waits_ms: int, **fields: object) -> FakeBatch:
    """A batch whose records are seen so long after `NOW_MS`."""
    early_ms = struct.pack(f"<{len(waits_ms)}I", *(waits_ms[-1] - each for each in waits_ms))
    bodies = [b"%d" % each for each in waits_ms]
    return batch(bodies, not_before_ms=NOW_MS + waits_ms[-1], early_ms=early_ms, **fields)


def shown(store: Store, latest: int) -> list[int]:
    """How many records are seen in each millisecond."""
    found = []
    for later_ms in range(latest):
        store.show_due(NOW_MS + later_ms)
        found.append(ends(store)[0])
    return found


def test_each_record_of_a_frame_is_seen_when_its_time_comes(store: Store) -> None:
    told = seen(store)
    stored = store.send(each_later(0, 1, 1, 4), NOW_MS, due_ms=NOW_MS).stored
    behind = store.send(batch([b"behind"]), NOW_MS).stored
    settle(store)
    assert shown(store, 6) == [1, 3, 3, 3, 5, 5]
    assert stored.store_ms == behind.store_ms == NOW_MS + 4
    assert told == [("orders", 0)] * 3


def test_frames_whose_times_overlap_are_seen_one_after_the_other(store: Store) -> None:
    store.send(each_later(1, 3), NOW_MS, due_ms=NOW_MS)
    store.send(each_later(2, 4, 5), NOW_MS, due_ms=NOW_MS)
    settle(store)
    assert shown(store, 6) == [0, 1, 1, 3, 4, 5]


def test_a_frame_of_which_a_part_is_seen_is_read_up_to_there(store: Store) -> None:
    store.send(batch([b"before"]), NOW_MS)
    store.send(each_later(0, 1, 2), NOW_MS, due_ms=NOW_MS)
    settle(store)
    store.show_due(NOW_MS + 1)
    queue = store.queue("orders", 0)
    read = reader.read_records(store.log, queue, 2, 100, 1 << 20)
    assert (read.records, read.next_offset) == (1, 3)
    whole = [reader.read_frames(store.log, queue, at, 1 << 20) for at in (0, 1)]
    assert [(len(each.slices), each.next_offset) for each in whole] == [(1, 1), (0, 1)]
    store.show_due(NOW_MS + 2)
    assert reader.read_frames(store.log, queue, 1, 1 << 20).next_offset == 4


def test_what_nobody_can_deliver_is_a_dead_letter_at_once(store: Store) -> None:
    timer_queue_changes.claim(store, TIMERS, range(4), NOW_MS, now_ms=NOW_MS)
    damaged = fire("orders", [b"a", b"b"])
    damaged.not_before_ms, damaged.early_ms = AHEAD_MS, b"odd"
    store.send(damaged, NOW_MS, due_ms=NOW_MS)
    settle(store)
    [letters] = store.queues_of(refused_fires.TOPIC)
    assert (letters.max_offset, len(store.hidden)) == (2, 0)


def remake(store: Store) -> None:
    store.delete_topic("orders")
    store.create_topic("orders", 2)


@pytest.mark.parametrize(("change", "there"), [(lambda store: None, 1), (remake, 0)])
def test_a_topic_that_is_made_anew_hides_nothing(
    store: Store, change: Callable[[Store], None], there: int
) -> None:
    store.send(ahead(), NOW_MS, due_ms=NOW_MS)
    change(store)
    settle(store)
    told = seen(store)
    store.show_due(AHEAD_MS)
    assert ends(store) == [there, 0]
    assert len(told) == there


@pytest.mark.parametrize("saved", [False, True])
def test_a_start_shows_it(saved: bool) -> None:
    disk = FaultyDisk()
    store = opened(disk)
    store.send(ahead(), NOW_MS, due_ms=NOW_MS)
    settle(store)
    if saved:
        save(store, disk)
    again = opened(disk.after_kill())
    assert ends(again) == [1, 0]
    # Store times go on from there.
    assert again.send(batch([b"next"]), NOW_MS).stored.store_ms == AHEAD_MS


def test_no_reader_sees_it_or_what_waits_behind_it(store: Store) -> None:
    """Also those that read on from what may be seen, a page at a time."""
    store.send(batch([b"seen"]), NOW_MS)
    store.send(ahead(), NOW_MS, due_ms=NOW_MS)
    store.send(batch([b"behind"]), NOW_MS)
    settle(store)
    queue = store.queue("orders", 0)
    frames = [reader.read_frames(store.log, queue, at, 1 << 20).next_offset for at in (0, 1)]
    assert frames == [1, 1]
    matching = filtered_read.read_matching(
        store.log, queue, 0, 100, 1 << 20, ANYTHING, message_pb2.Record.FromString
    )
    assert (matching.records, matching.next_offset) == (1, 1)
    told = reader.read_each(store.log, [(queue, at) for at in range(3)], 1 << 20)
    assert [isinstance(each, DuemqError) for each in told] == [False, True, True]
    assert time_search.first_stored_since(queue, AHEAD_MS) == 1
    assert queue.entry_from(1) is None


def test_what_is_said_of_a_queue_leaves_it_out(store: Store) -> None:
    queue = store.queue("orders", 0)
    said = []
    for change in (
        lambda: store.send(ahead(), NOW_MS, due_ms=NOW_MS),
        lambda: store.show_due(AHEAD_MS),
        lambda: store.send(ahead(until_ms=AHEAD_MS + 3), AHEAD_MS, due_ms=AHEAD_MS),
        lambda: store.show_due(AHEAD_MS + 3),
    ):
        change()
        settle(store)
        said.append((queue.records_from(0), queue.records_from(1), queue.last_store_ms()))
    assert said == [(0, 0, 0), (1, 0, AHEAD_MS), (1, 0, AHEAD_MS), (2, 1, AHEAD_MS + 3)]


@pytest.mark.parametrize("behind_ms", [1, 300_000])
def test_store_times_that_are_ahead_of_the_clock_hide_it_no_longer(
    store: Store, behind_ms: int
) -> None:
    """The clock went back: they stay in order.  Nobody waits for them."""
    store.send(batch([b"before"]), NOW_MS + behind_ms)
    stored = store.send(ahead(), NOW_MS, due_ms=NOW_MS).stored
    assert stored.store_ms == max(NOW_MS + behind_ms, AHEAD_MS)
    settle(store)
    assert store.hidden.next_ms == AHEAD_MS
    store.show_due(AHEAD_MS)
    assert ends(store) == [2, 0]


def test_store_times_go_on_from_there_if_the_clock_goes_back_as_it_is_shown(store: Store) -> None:
    store.send(ahead(), NOW_MS, due_ms=NOW_MS)
    settle(store)
    store.show_due(AHEAD_MS)  # by the clock as it was
    assert store.send(batch([b"next"]), NOW_MS - 2_000).stored.store_ms == AHEAD_MS


@pytest.mark.parametrize("back_ms", [2_000, 3_600_000])
def test_a_clock_that_is_set_back_shows_it_after_the_time_that_was_left(
    store: Store, back_ms: int
) -> None:
    """Not sooner, as the clock may have been right before; not later, as its queue waits."""
    for queue_id, later_ms in ((0, 0), (1, 1), (0, 2)):
        store.send(ahead(until_ms=AHEAD_MS + later_ms, queue_id=queue_id), NOW_MS, due_ms=NOW_MS)
    settle(store)
    now_ms = NOW_MS - back_ms
    store.clock_was_set(NOW_MS, back_ms)
    found = []
    for later_ms in range(2, 7):
        store.show_due(now_ms + later_ms)
        found.append(ends(store))
    assert found == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 1]]
    assert len(store.hidden) == 0


def test_another_thread_that_asks_for_the_end_as_it_is_shown_is_answered() -> None:
    class Shown(Queue):
        """By the loop, right after another thread has seen that something is hidden."""

        looks = itertools.cycle((1, None))
        _hidden_from = property(lambda self: next(self.looks), lambda self, _: None)  # type: ignore[assignment]

    disk = FaultyDisk()
    queue = Shown(Topic("orders", 1, 1), 0, "/queue", disk, OpenFiles(disk))
    assert [queue.max_offset for _ in range(3)] == [0, 0, 0]
