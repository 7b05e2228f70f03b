"""The store on a disk in memory: no thread, no loop, no clock."""

import dataclasses
import struct
from collections.abc import Callable
from functools import partial

import pytest

from duemq.errors import (
    Corrupt,
    FencedProducer,
    FencedTimer,
    InvalidArgument,
    InvariantError,
    OutOfSequence,
    Overloaded,
    QueueNotFound,
    ReadOnly,
    TooLarge,
    TopicNotFound,
    Unavailable,
)
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.protocol.names import TIMER_GROUP, TIMER_TOPIC
from duemq.protocol.retry_policy import RetryPolicy
from duemq.v1 import message_pb2
from duemq_server.broker.groups.progress import lags
from duemq_server.broker.reading import reader, time_search
from duemq_server.broker.reading.repeats import due_of
from duemq_server.broker.records import refused_fires
from duemq_server.broker.records.timer_claims import Service
from duemq_server.broker.store import checkpoint_state, journal, queues, recovery
from duemq_server.broker.store.changes import group_changes, offset_changes, timer_queue_changes
from duemq_server.broker.store.checkpoint_state import ROWS_AT_ONCE
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.producers import WINDOW_BATCHES
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.broker.store.topics import Topic
from duemq_server.storage.errors import CorruptLog, DiskFailed, DiskFull, UnknownVersion
from duemq_server.storage.indexes.index import FixedIndex
from duemq_server.storage.replicas import epoch
from duemq_server.storage.tools import set_aside
from duemq_server.storage.tools.check import check_consume_queues, check_log
from duemq_server.storage.tools.cut import cut
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch

DATA = "/data"
NOW_MS = 1_000_000
STORE_SETTINGS = StoreSettings(default_queues=2, timer_queues=4)


def opened(
    disk: FaultyDisk, settings: StoreSettings = STORE_SETTINGS, segment_bytes: int = 1 << 20
) -> Store:
    store = recovery.open_store(DATA, disk, settings, segment_bytes=segment_bytes).store
    settle(store)
    return store


def settle(store: Store) -> None:
    while store.log.write_pending():
        pass
    store.durable(store.log.durable_position)


def save(store: Store, disk: FaultyDisk) -> None:
    taken = store.freeze()()
    settle(store)
    for queue in store.all_queues():
        queue.sync()
    recovery.save_checkpoint(DATA, taken, disk)
    store.tables.erase_deleted(taken)


def records(store: Store, topic: str, queue_id: int = 0) -> bytes:
    queue = store.queue(topic, queue_id)
    return b"".join(reader.read_records(store.log, queue, 0, 65_536, 1 << 23).slices)


def test_nothing_is_seen_before_it_is_durable() -> None:
    store = opened(FaultyDisk())
    seen: list[tuple[str, int]] = []
    store.on_visible = lambda queue: seen.append(queue.key)
    sent = batch([b"a", b"b"])
    accepted = store.send(sent, NOW_MS)
    assert accepted.settled == store.log.end_position
    queue = store.queue("orders", 0)
    assert (queue.max_offset, queue.next_offset) == (0, 2)
    assert seen == []
    settle(store)
    assert queue.max_offset == 2
    assert seen == [("orders", 0)]
    assert records(store, "orders") == sent.records


def test_store_times_never_go_back_with_the_clock() -> None:
    store = opened(FaultyDisk())
    assert store.send(batch([b"a"]), NOW_MS).stored.store_ms == NOW_MS
    assert store.send(batch([b"b"]), NOW_MS - 500).stored.store_ms == NOW_MS


def test_a_clock_that_was_a_year_ahead_for_one_batch_is_not_followed_for_a_year() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    times = [NOW_MS, NOW_MS + 365 * 86_400_000, NOW_MS + 1_000, NOW_MS + 900]
    stamps = [store.send(batch([b"a"]), at).stored.store_ms for at in times]
    assert stamps == [*times[:3], times[2]]
    settle(store)
    for each in (store, opened(disk)):
        queue = each.queue("orders", 0)
        assert each.tables.store_ms == times[2]
        assert time_search.first_stored_since(queue, NOW_MS + 1) in (1, 2)


def test_what_is_due_soon_has_timer_queues_of_its_own() -> None:
    store = opened(FaultyDisk())
    sent = (batch([b"a"], queue_id=-1, producer_id=7 + n, **delays(60_001)) for n in range(50))
    assert {store.send(each, NOW_MS).stored.queue_id for each in sent} == {0, 1}
    sent = (batch([b"a"], queue_id=-1, producer_id=99 + n, **delays(60_000)) for n in range(50))
    assert {store.send(each, NOW_MS).stored.queue_id for each in sent} == {2, 3}


def test_a_timed_lane_of_a_queue_keeps_its_timer_queue_whatever_is_due_when() -> None:
    store = opened(FaultyDisk())
    for n, delay_ms in enumerate((5, 86_400_000, 60_000, 60_001)):
        sent = batch([b"a"], queue_id=1, producer_id=7, sequence=n, **delays(delay_ms))
        assert store.send(sent, NOW_MS).stored.queue_id == 1


def test_one_timer_queue_is_enough() -> None:
    store = opened(FaultyDisk(), StoreSettings(timer_queues=1))
    for n, queue_id in enumerate((-1, 1)):
        for sequence, delay_ms in enumerate((5, 86_400_000)):
            sent = batch(
                [b"a"], queue_id=queue_id, producer_id=7 + n, sequence=sequence, **delays(delay_ms)
            )
            assert store.send(sent, NOW_MS).stored.queue_id == 0


def delays(delay_ms: int) -> dict[str, bytes]:
    return {"delays_ms": struct.pack("<q", delay_ms)}


def test_timed_batches_of_one_lane_stay_on_one_timer_queue() -> None:
    store = opened(FaultyDisk())
    due = {"delays_ms": struct.pack("<q", 5)}
    homes = {
        store.send(
            batch([b"a"], queue_id=-1, producer_id=7, sequence=n, **due), NOW_MS
        ).stored.queue_id
        for n in range(5)
    }
    assert len(homes) == 1
    keyed = store.send(batch([b"a"], queue_id=1, producer_id=7, **due), NOW_MS)
    assert keyed.stored.queue_id == 1
    assert struct.unpack("<q", keyed.due_ms or b"") == (NOW_MS + 5,)


@pytest.mark.parametrize(
    "bad",
    [
        {"queue_id": 2},
        {"delays_ms": struct.pack("<q", -1)},
        {"sizes": b""},
        {"sequence": 1},
    ],
)
def test_a_refused_batch_changes_nothing(bad: dict[str, object]) -> None:
    store = opened(FaultyDisk())
    end = store.log.end_position
    sent = batch([b"a"])
    for name, value in bad.items():
        setattr(sent, name, value)
    with pytest.raises((InvalidArgument, QueueNotFound)):
        store.send(sent, NOW_MS)
    assert store.log.end_position == end
    assert "orders" not in store.topics


@pytest.mark.parametrize("due", [{}, delays(5)], ids=["now", "timed"])
def test_a_batch_for_which_there_is_no_room_makes_no_topic(due: dict[str, bytes]) -> None:
    store = opened(FaultyDisk())
    store.send(batch([b"a"], topic="others"), NOW_MS)  # it waits for the disk
    store.log._pending_bytes_max = store.log.pending_bytes + 800
    end = store.log.end_position
    with pytest.raises(Overloaded):
        store.send(batch([b"x" * 700], **due), NOW_MS)
    assert (store.log.end_position, "orders" in store.topics) == (end, False)
    settle(store)
    store.send(batch([b"x" * 700], **due), NOW_MS)


def test_lanes_are_known_again_after_a_start() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    for number in range(3):
        store.send(
            batch([b"%d" % number], producer_id=7, producer_epoch=2, sequence=number), NOW_MS
        )
        if number == 1:
            save(store, disk)
    settle(store)
    store = opened(disk)
    again = store.send(batch([b"2"], producer_id=7, producer_epoch=2, sequence=2), NOW_MS + 9)
    assert again.duplicate
    assert (again.stored.base_offset, again.stored.store_ms) == (2, NOW_MS)
    with pytest.raises(OutOfSequence):
        store.send(batch([b"4"], producer_id=7, producer_epoch=2, sequence=4), NOW_MS)
    with pytest.raises(FencedProducer):
        store.send(batch([b"3"], producer_id=7, producer_epoch=1, sequence=3), NOW_MS)


def turned_read_only(store: Store) -> None:
    store.read_only = True


def without_the_topic(store: Store) -> None:
    store.delete_topic("orders")


def with_lower_limits(store: Store) -> None:
    low = dataclasses.replace(store.settings.limits, batch_bytes_max=1)
    store.settings = dataclasses.replace(store.settings, limits=low)


def without_new_topics(store: Store) -> None:
    without_the_topic(store)
    store.settings = dataclasses.replace(store.settings, auto_create_topics=False)


TIMED = {"delays_ms": struct.pack("<q", 5)}


@pytest.mark.parametrize(
    ("refusing", "due"),
    [
        (turned_read_only, {}),
        (turned_read_only, TIMED),
        (with_lower_limits, {}),
        (with_lower_limits, TIMED),
        (without_the_topic, TIMED),
        (without_new_topics, TIMED),
    ],
)
def test_what_was_stored_is_found_whatever_may_refuse_the_batch_now(
    refusing: Callable[[Store], None], due: dict[str, bytes]
) -> None:
    disk = FaultyDisk()
    store = opened(disk)
    sent = batch([b"a"], producer_id=7, **due)
    first = store.send(sent, NOW_MS)
    settle(store)
    refusing(store)
    settle(store)
    for each in (store, opened(disk)):
        end = each.log.end_position
        again = each.send(sent, NOW_MS, Overloaded("the disk is behind"))
        assert (again.duplicate, again.stored, each.log.end_position) == (True, first.stored, end)


def test_a_batch_too_old_to_be_known_is_not_refused_as_if_it_were_not_stored() -> None:
    store = opened(FaultyDisk())
    for number in range(WINDOW_BATCHES + 1):
        store.send(batch([b"a"], producer_id=7, sequence=number), NOW_MS)
    store.read_only = True
    with pytest.raises(OutOfSequence, match="was stored"):
        store.send(batch([b"a"], producer_id=7), NOW_MS)
    with pytest.raises(ReadOnly):  # what comes behind a batch that was refused is refused as it was
        store.send(batch([b"a"], producer_id=7, sequence=WINDOW_BATCHES + 2), NOW_MS)


def test_a_repeats_due_times_are_those_of_the_first_time() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    sent = batch([b"a", b"b"], producer_id=7, delays_ms=struct.pack("<2q", 5, 9))
    first = store.send(sent, NOW_MS)
    settle(store)
    for each in (store, opened(disk)):
        again = each.send(sent, NOW_MS + 1_000)
        assert (again.duplicate, again.due_ms) == (True, None)
        assert due_of(each.log, again.stored) == first.due_ms


def test_a_topic_made_again_has_neither_records_nor_offsets_nor_lanes() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    key = GroupQueue("g", "orders", 0)
    store.send(batch([b"old"] * 3, producer_id=7), NOW_MS)
    offset_changes.put(store, "g", [(key, GroupOffset(2, 5))])
    save(store, disk)
    store.delete_topic("orders")
    fresh = batch([b"new"], producer_id=7)
    assert store.send(fresh, NOW_MS).stored.base_offset == 0
    settle(store)
    for each in (store, opened(disk)):
        assert records(each, "orders") == fresh.records
        assert each.offsets.find(key) is None


def test_a_start_without_checkpoint_ignores_stale_consume_queues() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    sent = batch([b"a"])
    store.send(sent, NOW_MS)
    save(store, disk)
    disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")
    again = opened(disk)
    assert records(again, "orders") == sent.records
    assert again.queue("orders", 0).max_offset == 1


def test_a_consume_queue_that_has_lost_a_file_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It looked like offsets that the log has lost, which all step over."""
    monkeypatch.setattr(queues, "FixedIndex", partial(FixedIndex, file_bytes=10 * 32))
    disk = FaultyDisk()
    store = opened(disk)
    for _ in range(45):
        store.send(batch([b"a"]), NOW_MS)
    save(store, disk)
    [lost] = [each for each in disk.paths if "/orders." in each and each.endswith("10")]
    disk.unlink(lost)
    again = opened(disk)
    queue = again.queue("orders", 0)
    assert [queue.present(offset) for offset in range(45)] == list(range(45))
    assert queue.records_from(0) == 45
    assert records(again, "orders") == batch([b"a"]).records * 45
    assert lost in caplog.text


def test_records_that_retention_removed_are_gone_after_a_start_too() -> None:
    disk = FaultyDisk()
    store = opened(disk, segment_bytes=4_096)
    for number in range(20):
        store.send(batch([b"%d" % number + bytes(1_000)]), NOW_MS)
    save(store, disk)
    cut = store.log.segments[2].start
    store.tables.drop_before(cut)
    store.log.delete_before(cut)
    first = store.queue("orders", 0).min_offset
    assert first > 0
    again = opened(disk, segment_bytes=4_096)
    assert again.queue("orders", 0).min_offset == first
    read = reader.read_records(again.log, again.queue("orders", 0), first, 100, 1 << 20)
    assert read.records == 20 - first
    disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")
    rebuilt = opened(disk, segment_bytes=4_096)
    assert rebuilt.queue("orders", 0).min_offset == first
    assert rebuilt.queue("orders", 0).max_offset == 20


def test_a_topic_whose_making_is_forgotten_has_the_queues_of_its_frames() -> None:
    disk = FaultyDisk()
    store = opened(disk, segment_bytes=4_096)
    store.create_topic("wide", 9)
    sent = batch([b"x" * 3_000], topic="wide", queue_id=6)
    for _ in range(4):
        store.send(sent, NOW_MS)
    save(store, disk)
    store.log.delete_before(store.log.segments[-1].start)
    disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")
    again = opened(disk, segment_bytes=4_096)
    assert len(again.queues_of("wide")) == 7
    assert again.queue("wide", 6).max_offset == 4


def test_a_full_disk_refuses_what_is_new_and_shows_what_it_holds_later() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    sent = [batch([b"%d" % number] * 100) for number in range(40)]
    for each in sent[:20]:
        store.send(each, NOW_MS)
    settle(store)
    for each in sent[20:]:
        store.send(each, NOW_MS)
    while store.log.write_pending():
        pass
    disk.capacity_bytes = disk.used_bytes()
    store.durable(store.log.durable_position)  # the consume queue finds no space
    assert not store.writable
    with pytest.raises(ReadOnly):
        store.send(batch([b"x"]), NOW_MS)
    with pytest.raises(ReadOnly):
        store.create_topic("other")
    disk.capacity_bytes = None
    store.durable(store.log.durable_position)
    assert store.writable
    assert records(store, "orders") == b"".join(each.records for each in sent)


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.delete_topic("orders"),
        lambda store: offset_changes.purge(store, "orders", {0: 1}),
        lambda store: group_changes.delete(store, "g"),
        lambda store: timer_queue_changes.release(store, TIMERS.id, LATER_MS),
        lambda store: timer_queue_changes.claim(store, OTHER, [1], NOW_MS, now_ms=NOW_MS),
    ],
    ids=["delete", "purge", "delete group", "release", "claim"],
)
def test_what_makes_space_is_done_while_space_is_short(
    change: Callable[[Store], object],
) -> None:
    """Timers that nobody has taken over hold the log; so does what should go."""
    store = opened(FaultyDisk())
    store.send(batch([b"a", b"b"]), NOW_MS)
    offset_changes.put(store, "g", [(GroupQueue("g", "orders", 0), GroupOffset(1, 0))])
    timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, now_ms=NOW_MS)
    settle(store)
    store.read_only = True
    end = store.log.end_position
    change(store)
    assert store.log.end_position > end
    store.refusal = "not enough replicas are in sync"
    with pytest.raises(ReadOnly, match="in sync"):
        store.delete_topic("other")


def test_a_topic_must_be_made_where_that_is_the_rule() -> None:
    store = opened(FaultyDisk(), StoreSettings(auto_create_topics=False))
    with pytest.raises(TopicNotFound):
        store.send(batch([b"a"]), NOW_MS)
    store.create_topic("orders")
    store.send(batch([b"a"]), NOW_MS)


def test_the_timer_topic_keeps_its_queues() -> None:
    disk = FaultyDisk()
    save(opened(disk), disk)
    assert len(opened(disk, StoreSettings(timer_queues=9)).queues_of(TIMER_TOPIC)) == 4


def test_a_commit_that_changes_nothing_costs_no_log() -> None:
    store = opened(FaultyDisk())
    store.send(batch([b"a"]), NOW_MS)
    change = [(GroupQueue("g", "orders", 0), GroupOffset(1, 5))]
    offset_changes.put(store, "g", change)
    end = store.log.end_position
    # It may still be on its way to the disk: the answer waits for that.
    assert offset_changes.put(store, "g", change) == end
    assert store.log.end_position == end


def test_lags_count_what_a_group_has_not_committed() -> None:
    store = opened(FaultyDisk())
    store.send(batch([b"a"] * 5), NOW_MS)
    offset_changes.put(store, "g", [(GroupQueue("g", "orders", 0), GroupOffset(2, 1))])
    settle(store)
    assert lags(store) == {("g", "orders"): 3}


def test_a_topic_keeps_its_id_and_one_that_is_made_anew_never_gets_it() -> None:
    disk, given = FaultyDisk(), set[int]()
    for _ in range(3):
        store = opened(disk)
        topic, _ = store.create_topic("orders")
        given.add(topic.id)
        settle(store)
        store.close()
        store = opened(disk)
        assert store.queue("orders", 1, topic.id).topic_id == topic.id
        store.delete_topic("orders")
        settle(store)
        store.close()
    assert len(given) == 3


def test_journal_entries_round_trip() -> None:
    topic = Topic("orders", 3, 4, 100)
    assert journal.read_topic_created(memoryview(journal.topic_created(topic))) == topic
    assert journal.read_topic_deleted(memoryview(journal.topic_deleted("orders"))) == "orders"
    changes = [(GroupQueue("g", "orders", 1), GroupOffset(5, 6))]
    assert journal.read_offsets(memoryview(journal.offsets("g", changes))) == changes


def test_the_checkpoint_round_trips_and_knows_its_version() -> None:
    taken = opened(FaultyDisk()).freeze()()._replace(lanes=b"\x00lanes")
    payload = b"".join(checkpoint_state.encode(taken))
    assert checkpoint_state.decode(payload) == taken
    with pytest.raises(UnknownVersion):
        checkpoint_state.decode(payload.replace(b'"version":3', b'"version":6'))


def test_a_long_list_of_the_checkpoint_is_made_in_pieces() -> None:
    taken = opened(FaultyDisk()).freeze()()
    taken = taken._replace(offsets=[["g", "t", at, at, 5] for at in range(2 * ROWS_AT_ONCE + 1)])
    assert checkpoint_state.decode(b"".join(checkpoint_state.encode(taken))) == taken


def test_a_checkpoint_is_as_of_when_it_was_taken_whatever_comes_meanwhile() -> None:
    """It is made in another thread."""
    store = opened(FaultyDisk())
    key = GroupQueue("billing", "orders", 0)

    def change(number: int) -> None:
        store.send(batch([b"%d" % number], producer_id=5, sequence=number), NOW_MS + number)
        offset_changes.put(store, "billing", [(key, GroupOffset(number, 5))])
        store.offsets.settle(key, [number + 5])
        group_changes.put(store, GroupConfig("billing", RetryPolicy(number)))
        store.create_topic(f"t{number}")

    change(0)
    expected, frozen = store.freeze()(), store.freeze()
    change(1)
    store.producers.forget_beyond(0)
    group_changes.delete(store, "billing")
    store.delete_topic("orders")
    assert store.freeze()() != expected
    assert frozen() == expected


TIMERS = Service(SERVICE_IDS_FROM + 7, "t1", 0, 1)
OTHER = Service(SERVICE_IDS_FROM + 8, "t2", 0, 1)
LATER_MS = NOW_MS + 3_600_000


def fire(topic: str, bodies: list[bytes], sequence: int = 0, queue_id: int = 0, **fields: object):
    return batch(
        bodies, topic=topic, queue_id=queue_id, producer_id=TIMERS.id, sequence=sequence, **fields
    )


def test_a_rebuild_of_consume_queues_leaves_the_owner_of_timer_queues_alone() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    timer_queue_changes.claim(store, TIMERS, range(4), NOW_MS, now_ms=NOW_MS)
    timer_queue_changes.release(store, TIMERS.id, LATER_MS)
    timer_queue_changes.claim(store, OTHER, range(4), LATER_MS, now_ms=NOW_MS)
    store.send(batch([b"a"], producer_id=5), NOW_MS)
    save(store, disk)
    expected = store.timer_owners.encode()
    for path in [path for path in disk.paths if "consumequeue" in path]:
        disk.unlink(path)
    again = opened(disk.after_kill())
    assert again.timer_owners.encode() == expected
    again.timer_owners.check_not_fenced(OTHER.id)
    assert again.send(batch([b"a"], producer_id=5), NOW_MS).duplicate


def test_a_cut_log_gives_a_topic_made_anew_nothing_of_the_one_before() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    store.send(batch([b"old"]), NOW_MS)
    settle(store)
    end = store.log.end_position
    store.delete_topic("orders")
    store.send(batch([b"new"]), NOW_MS)
    save(store, disk)
    made = store.topics.find("orders")
    store.close()
    cut(f"{DATA}/{recovery.LOG_DIRECTORY}", end, disk)
    again = opened(disk)
    assert again.topics.find("orders") == made
    queue = again.queue("orders", 0)
    assert (queue.records_from(0), queue.next_offset) == (0, 1)


@pytest.mark.parametrize("saved", [False, True])
def test_the_owner_of_timer_queues_is_known_again_after_a_start(saved: bool) -> None:
    disk = FaultyDisk()
    store = opened(disk)
    timer_queue_changes.claim(store, TIMERS, range(4), NOW_MS, now_ms=NOW_MS)
    settle(store)
    if saved:
        save(store, disk)
    store = opened(disk.after_kill())
    store.timer_owners.check(3, TIMERS.id, NOW_MS)
    _, settled = timer_queue_changes.claim(store, TIMERS, range(4), NOW_MS, now_ms=NOW_MS)
    assert settled == store.log.end_position
    with pytest.raises(FencedTimer, match=r"t1 \(shard 0 of 1, id 8000000000000007\)"):
        timer_queue_changes.claim(store, OTHER, range(4), NOW_MS, now_ms=NOW_MS)


def test_a_released_service_is_fenced_when_another_one_has_claimed_its_queues() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    timer_queue_changes.claim(store, TIMERS, range(4), NOW_MS, now_ms=NOW_MS)
    store.send(fire("orders", [b"a"]), NOW_MS)
    timer_queue_changes.release(store, TIMERS.id, LATER_MS)
    timer_queue_changes.claim(store, OTHER, range(4), LATER_MS, now_ms=NOW_MS)
    assert len(store.producers) == 0
    settle(store)
    store = opened(disk.after_kill())
    store.timer_owners.check(0, OTHER.id, LATER_MS)
    with pytest.raises(FencedTimer, match="replaced"):
        store.send(fire("orders", [b"b"], 1), LATER_MS)
    with pytest.raises(FencedTimer, match="replaced"):
        timer_queue_changes.claim(store, TIMERS, range(4), LATER_MS, now_ms=NOW_MS)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_offsets_that_a_timer_service_has_taken_over_are_not_given_again(
    first: int, saved: bool
) -> None:
    """The data is from an older copy: the service would take the new messages for the old."""
    disk, settings = FaultyDisk(), StoreSettings(timer_queues=1)
    store = opened(disk, settings)
    store.create_topic("orders", 2)
    for _ in range(first):
        store.send(batch([b"a"], queue_id=1, **TIMED), NOW_MS)
    timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {0: 0}, now_ms=NOW_MS)
    settle(store)
    disk = disk.after_kill()
    store = opened(disk, settings)
    for end in (5, 7, 7, 5):  # the rest was not durable there at first
        timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {0: end}, now_ms=NOW_MS)
    if saved:
        save(store, disk)
    assert store.send(batch([b"c"], queue_id=1, **TIMED), NOW_MS).stored.base_offset == 7
    settle(store)
    for now in (store, opened(disk.after_kill(), settings)):
        queue = now.queue(TIMER_TOPIC, 0)
        assert (queue.max_offset, queue.next_offset, queue.records_from(0)) == (8, 8, first + 1)
        found = reader.read_frames(now.log, queue, 7, 1 << 20)
        assert (len(found.slices), found.next_offset) == (1, 8)


def test_offsets_that_were_given_a_second_time_already_are_left_for_the_service_to_see() -> None:
    """It stops, and says so: what came under them it cannot tell from what it has."""
    disk, settings = FaultyDisk(), StoreSettings(timer_queues=1)
    store = opened(disk, settings)
    store.create_topic("orders", 2)
    settle(store)
    store = opened(disk.after_kill(), settings)
    store.send(batch([b"b"], queue_id=1, **TIMED), NOW_MS)
    for _ in range(2):
        timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {0: 7}, now_ms=NOW_MS)
        settle(store)
    assert store.queue(TIMER_TOPIC, 0).next_offset == 1


def test_a_claim_is_not_answered_before_such_offsets_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service would take it that messages came under them already, and end the queue."""
    store = opened(FaultyDisk(), StoreSettings(timer_queues=1))
    timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, now_ms=NOW_MS)

    def full(_: FixedIndex, number: int) -> None:
        raise DiskFull(f"{number}: no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(FixedIndex, "skip_to", full)
        with pytest.raises(ReadOnly, match="no space left"):
            timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {0: 7}, now_ms=NOW_MS)
    timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {0: 7}, now_ms=NOW_MS)
    assert store.queue(TIMER_TOPIC, 0).next_offset == 7


def test_nor_are_they_left_out_when_the_broker_is_started_once_more() -> None:
    """What came under them is not lost because somebody tries that first."""
    disk, settings = FaultyDisk(), StoreSettings(timer_queues=1)
    store = opened(disk, settings)
    timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {0: 0}, now_ms=NOW_MS)
    save(store, disk)
    disk = disk.after_kill()
    store = opened(disk, settings)
    store.create_topic("orders", 2)
    store.send(batch([b"b"], queue_id=1, **TIMED), NOW_MS)
    save(store, disk)
    for _ in range(2):
        disk = disk.after_kill()
        store = opened(disk, settings)
        timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {0: 7}, now_ms=NOW_MS)
        save(store, disk)
        assert store.queue(TIMER_TOPIC, 0).next_offset == 1
    # It has taken over what is here, as of another store: from then on what is here is known to it.
    timer_queue_changes.note_fetched(store, 0, 1)
    save(store, disk)
    store = opened(disk.after_kill(), settings)
    timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {0: 7}, now_ms=NOW_MS)
    assert store.queue(TIMER_TOPIC, 0).next_offset == 7


@pytest.mark.parametrize("error", [DiskFull, DiskFailed])
def test_a_consume_queue_that_cannot_be_written_keeps_no_store_from_its_end(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(FaultyDisk())
    store.send(batch([b"a"]), NOW_MS)
    settle(store)

    def fail(_: FixedIndex) -> None:
        raise error("as it happens")

    monkeypatch.setattr(FixedIndex, "flush", fail)
    store.close()
    assert store.log._writer is None


@pytest.mark.parametrize("fetched", [True, False])
def test_who_has_fetched_has_said_how_far_it_is(fetched: bool) -> None:
    """Its first claim may have come before it knew anything of the queue, and be its last one."""
    disk, settings = FaultyDisk(), StoreSettings(timer_queues=1)
    store = opened(disk, settings)
    timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {}, now_ms=NOW_MS)
    store.create_topic("orders", 2)
    store.send(batch([b"a"], queue_id=1, **TIMED), NOW_MS)
    if fetched:
        timer_queue_changes.note_fetched(store, 0, 1)
    save(store, disk)
    store = opened(disk.after_kill(), settings)  # a copy, from before the owner took 4 over
    timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {0: 4}, now_ms=NOW_MS)
    assert store.queue(TIMER_TOPIC, 0).next_offset == (4 if fetched else 1)


@pytest.mark.parametrize("committed", [0, 1])
def test_what_is_committed_was_fetched_also_if_no_checkpoint_says_so(committed: int) -> None:
    """One between a start and the first fetch says that nobody has fetched."""
    disk, settings = FaultyDisk(), StoreSettings(timer_queues=1)
    store = opened(disk, settings)
    store.create_topic("orders", 2)
    timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {}, now_ms=NOW_MS)
    save(store, disk)
    store.send(batch([b"a"], queue_id=1, **TIMED), NOW_MS)
    timer_queue_changes.note_fetched(store, 0, 1)
    key = GroupQueue(TIMER_GROUP, TIMER_TOPIC, 0)
    offset_changes.put(store, TIMER_GROUP, [(key, GroupOffset(committed, 0))])
    settle(store)
    store = opened(disk.after_kill(), settings)  # a copy, from before the owner took 4 over
    timer_queue_changes.claim(store, TIMERS, [0], NOW_MS, {0: 4}, now_ms=NOW_MS)
    assert store.queue(TIMER_TOPIC, 0).next_offset == (4 if committed else 1)


@pytest.mark.parametrize("first", [0, 2])
def test_who_fetches_behind_what_was_given_from_this_data_is_told(first: int) -> None:
    """Messages that came under offsets of others would be passed over, and nobody notice."""
    disk, settings = FaultyDisk(), StoreSettings(timer_queues=1)
    store = opened(disk, settings)
    store.create_topic("orders", 2)
    for _ in range(first):
        store.send(batch([b"a"], queue_id=1, **TIMED), NOW_MS)
    settle(store)
    store = opened(disk.after_kill(), settings)
    for _ in range(5):
        store.send(batch([b"b"], queue_id=1, **TIMED), NOW_MS)
    settle(store)
    for offset in (0, first, first + 6):  # the last one is out of range, as the read says
        timer_queue_changes.check_fetch(store, 0, offset)
    with pytest.raises(InvalidArgument, match=f"offset: {first + 3} is .* at most {first}, up to"):
        timer_queue_changes.check_fetch(store, 0, first + 3)
    timer_queue_changes.note_fetched(store, 0, first + 3)
    timer_queue_changes.note_fetched(store, 0, first)
    timer_queue_changes.check_fetch(store, 0, first + 3)


def test_who_fetches_behind_what_is_kept_no_more_is_not_told_of_copies() -> None:
    store = opened(FaultyDisk(), StoreSettings(timer_queues=1))
    store.create_topic("orders", 2)
    for _ in range(5):
        store.send(batch([b"b"], queue_id=1, **TIMED), NOW_MS)
    settle(store)
    queue = store.queue(TIMER_TOPIC, 0)
    queue.drop_before(3)
    timer_queue_changes.check_fetch(store, 0, 3)
    with pytest.raises(InvalidArgument):
        timer_queue_changes.check_fetch(store, 0, 4)


@pytest.mark.parametrize("saved", [False, True])
def test_what_was_handed_over_begins_where_it_was_left_after_a_start(saved: bool) -> None:
    disk = FaultyDisk()
    store = opened(disk, StoreSettings(timer_queues=2))
    store.create_topic("orders", 2)
    sent = store.send(batch([b"a"], producer_id=5, queue_id=1, **TIMED), NOW_MS)
    timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, now_ms=NOW_MS)
    settle(store)
    mine, its = sent.stored.queue_id, 1 - sent.stored.queue_id
    timer_queue_changes.note_fetched(store, mine, 1)
    ends = {mine: 1, its: 7}  # more than there is
    now = dataclasses.replace(TIMERS, shard=its, shards=2, key_shards=1)
    decision, _ = timer_queue_changes.claim(store, now, [its], NOW_MS, ends, now_ms=NOW_MS)
    assert decision.leaves == (mine,)
    settle(store)
    if saved:
        save(store, disk)
    store = opened(disk.after_kill(), StoreSettings(timer_queues=2))
    owners = store.timer_owners
    assert (owners.begin_of(mine), owners.begin_of(its), owners.key_shards) == (1, 0, 1)
    assert owners.claim_of(mine) is None
    other = dataclasses.replace(OTHER, shard=mine, shards=2, key_shards=1)
    assert timer_queue_changes.claim(store, other, [mine], NOW_MS, now_ms=NOW_MS)[0].granted == (
        mine,
    )
    committed = store.offsets.find(GroupQueue(TIMER_GROUP, TIMER_TOPIC, mine))
    assert committed is not None
    assert committed.offset == 1
    decision, settled = timer_queue_changes.claim(store, now, [its], NOW_MS, ends, now_ms=NOW_MS)
    assert not decision.changes
    assert settled == store.log.end_position


@pytest.mark.parametrize("saved", [False, True])
def test_who_led_a_timer_service_before_hands_nothing_over_after_a_start(saved: bool) -> None:
    disk = FaultyDisk()
    store = opened(disk, StoreSettings(timer_queues=2))
    timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, epoch=1, now_ms=NOW_MS)
    _, settled = timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, epoch=2, now_ms=NOW_MS)
    assert settled == store.log.end_position  # its answer waits for the entry
    settle(store)
    end = store.log.end_position
    timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, epoch=2, now_ms=NOW_MS)
    assert store.log.end_position == end
    if saved:
        save(store, disk)
    store = opened(disk.after_kill(), StoreSettings(timer_queues=2))
    now = dataclasses.replace(TIMERS, shard=1, shards=2, key_shards=1)
    for _ in range(2):
        with pytest.raises(Unavailable, match="since epoch 2"):
            timer_queue_changes.claim(store, now, [1], NOW_MS, {0: 7}, epoch=1, now_ms=NOW_MS)
        owned = store.timer_owners.claim_of(0)
        assert owned is not None
        assert owned.service.id == TIMERS.id
        timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, epoch=2, now_ms=NOW_MS)


def test_a_new_leader_of_a_timer_service_claims_though_there_is_no_space() -> None:
    store = opened(FaultyDisk(), StoreSettings(timer_queues=2))
    timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, epoch=1, now_ms=NOW_MS)
    store.read_only = True
    end = store.log.end_position
    decision, _ = timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, epoch=2, now_ms=NOW_MS)
    assert (decision.granted, store.log.end_position) == ((0, 1), end)
    store.read_only = False
    timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, epoch=2, now_ms=NOW_MS)
    assert store.log.end_position > end


@pytest.mark.parametrize(("formers", "begin"), [((), 5), ((OTHER.id,), 0)])
def test_what_was_given_up_begins_where_it_was_left(formers: tuple[int, ...], begin: int) -> None:
    """But for replicas of the lost one, which have a copy of their own."""
    disk = FaultyDisk()
    store = opened(disk, StoreSettings(timer_queues=1))
    timer_queue_changes.claim(store, OTHER, [0], NOW_MS, now_ms=NOW_MS)
    offset_changes.put(
        store, TIMER_GROUP, [(GroupQueue(TIMER_GROUP, TIMER_TOPIC, 0), GroupOffset(5, 0))]
    )
    timer_queue_changes.release(store, OTHER.id, LATER_MS)
    timer_queue_changes.claim(store, TIMERS, [0], LATER_MS, formers=formers, now_ms=NOW_MS)
    settle(store)
    assert store.timer_owners.begin_of(0) == begin
    store = opened(disk.after_kill(), StoreSettings(timer_queues=1))
    assert store.timer_owners.begin_of(0) == begin


def test_what_a_copy_of_a_data_directory_has_not_is_fetched_again() -> None:
    store = opened(FaultyDisk(), StoreSettings(timer_queues=2))
    store.create_topic("orders", 2)
    for producer_id in (5, 6):
        sent = batch([b"a"], producer_id=producer_id, queue_id=1, **TIMED)
        mine = store.send(sent, NOW_MS).stored.queue_id
    settle(store)
    timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, now_ms=NOW_MS)
    key = GroupQueue(TIMER_GROUP, TIMER_TOPIC, mine)
    timer_queue_changes.note_fetched(store, mine, 2)
    offset_changes.put(store, TIMER_GROUP, [(key, GroupOffset(2, 0))])
    now = dataclasses.replace(TIMERS, shard=1 - mine, shards=2, key_shards=1)
    timer_queue_changes.claim(store, now, [1 - mine], NOW_MS, {mine: 1}, now_ms=NOW_MS)
    assert store.timer_owners.begin_of(mine) == 1
    committed = store.offsets.find(key)
    assert committed is not None
    assert committed.offset == 1


@pytest.mark.parametrize("saved", [False, True])
def test_queues_of_a_shard_that_was_given_up_begin_where_it_left_them(saved: bool) -> None:
    """Also those that the first who comes after it does not claim."""
    disk = FaultyDisk()
    store = opened(disk, StoreSettings(timer_queues=2))
    lost = dataclasses.replace(OTHER, shard=0, shards=1)
    timer_queue_changes.claim(store, lost, [0, 1], NOW_MS, now_ms=NOW_MS)
    for queue_id, offset in ((0, 5), (1, 7)):
        key = GroupQueue(TIMER_GROUP, TIMER_TOPIC, queue_id)
        offset_changes.put(store, TIMER_GROUP, [(key, GroupOffset(offset, 0))])
    timer_queue_changes.release(store, lost.id, LATER_MS)
    next_one = dataclasses.replace(TIMERS, shard=0, shards=2, key_shards=1)
    timer_queue_changes.claim(store, next_one, [0], LATER_MS, now_ms=NOW_MS)
    settle(store)
    if saved:
        save(store, disk)
    store = opened(disk.after_kill(), StoreSettings(timer_queues=2))
    owners = store.timer_owners
    assert owners.claim_of(1) is None
    assert [owners.begin_of(queue) for queue in (0, 1)] == [5, 7]


def test_who_had_more_than_the_log_has_now_leaves_what_comes_next() -> None:
    store = opened(FaultyDisk(), StoreSettings(timer_queues=2))
    timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, now_ms=NOW_MS)
    now = dataclasses.replace(TIMERS, shards=2, key_shards=1)
    timer_queue_changes.claim(store, now, [0], NOW_MS, {1: 7}, now_ms=NOW_MS)
    assert store.timer_owners.begin_of(1) == 0


def test_nor_does_the_next_owner_miss_what_came_to_an_older_copy() -> None:
    """Under offsets that the one before had taken over."""
    disk, settings = FaultyDisk(), StoreSettings(timer_queues=2)
    store = opened(disk, settings)
    store.create_topic("orders", 2)
    timer_queue_changes.claim(store, TIMERS, [0, 1], NOW_MS, now_ms=NOW_MS)
    settle(store)
    store = opened(disk.after_kill(), settings)
    for _ in range(3):
        sent = store.send(batch([b"b"], producer_id=5, queue_id=1, **TIMED), NOW_MS)
    settle(store)
    came = sent.stored.queue_id
    now = dataclasses.replace(TIMERS, shard=1 - came, shards=2, key_shards=1)
    timer_queue_changes.claim(store, now, [1 - came], NOW_MS, {came: 7}, now_ms=NOW_MS)
    begin = store.timer_owners.begin_of(came)
    timer_queue_changes.check_fetch(store, came, begin)
    assert begin == 0


@pytest.mark.parametrize("known", [False, True])
def test_what_was_accepted_for_later_is_stored_whatever_the_limits_are_now(known: bool) -> None:
    store = opened(FaultyDisk())
    store.create_topic("orders", 2, message_bytes_max=1_000)
    if known:
        timer_queue_changes.claim(store, TIMERS, range(4), NOW_MS, now_ms=NOW_MS)
    sent = fire("orders", [b"x" * 5_000])
    if not known:
        with pytest.raises(TooLarge):
            store.send(sent, NOW_MS)
        return
    store.send(sent, NOW_MS)
    settle(store)
    assert records(store, "orders") == sent.records
    with pytest.raises(TooLarge):  # not of what is sent to be delivered later
        store.send(fire("orders", [b"x" * 5_000], delays_ms=struct.pack("<q", 5)), NOW_MS)


@pytest.mark.parametrize("saved", [False, True])
def test_due_messages_of_a_queue_that_is_gone_go_to_one_that_is_there_once(saved: bool) -> None:
    disk = FaultyDisk()
    store = opened(disk)
    timer_queue_changes.claim(store, TIMERS, range(4), NOW_MS, now_ms=NOW_MS)
    store.create_topic("orders", 2)
    first = store.send(fire("orders", [b"a"], 0, queue_id=5), NOW_MS)
    assert first.stored.queue_id == 1
    store.send(fire("orders", [b"b"], 0, queue_id=1), NOW_MS)  # another lane
    settle(store)
    if saved:
        save(store, disk)
    store = opened(disk.after_kill())
    again = store.send(fire("orders", [b"a"], 0, queue_id=5), NOW_MS)
    assert again.duplicate
    assert again.stored == first.stored
    store.send(fire("orders", [b"c"], 1, queue_id=5), NOW_MS)
    settle(store)
    assert store.queue("orders", 1).max_offset == 3
    with pytest.raises(QueueNotFound):
        store.send(batch([b"x"], queue_id=5), NOW_MS)


def test_due_messages_that_can_never_be_stored_become_dead_letters_once() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    timer_queue_changes.claim(store, TIMERS, range(4), NOW_MS, now_ms=NOW_MS)
    damaged = fire("orders", [b"a", b"b"])
    damaged.sizes = struct.pack("<2I", 3, len(damaged.records) - 3)
    store.send(damaged, NOW_MS)
    store.send(fire("orders", [b"c"], 1), NOW_MS)
    settle(store)
    store = opened(disk.after_kill())
    assert store.send(damaged, NOW_MS).duplicate
    assert store.queue("orders", 0).max_offset == 1
    found = message_pb2.RecordBatch.FromString(records(store, refused_fires.TOPIC)).records
    assert [each.body for each in found] == [b"a", b"b"]
    assert found[0].retry.origin.topic == "orders"
    assert "sizes" in found[0].retry.error


def test_bytes_that_are_no_records_become_one_dead_letter() -> None:
    store = opened(FaultyDisk())
    timer_queue_changes.claim(store, TIMERS, range(4), NOW_MS, now_ms=NOW_MS)
    damaged = fire("orders", [b"a"])
    damaged.records = b"\xff" * len(damaged.records)
    store.send(damaged, NOW_MS)
    settle(store)
    [found] = message_pb2.RecordBatch.FromString(records(store, refused_fires.TOPIC)).records
    assert found.body == damaged.records
    assert found.message_id


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("timed", [False, True])
def test_a_frame_that_was_set_aside_is_skipped_by_those_who_read(saved: bool, timed: bool) -> None:
    disk = FaultyDisk()
    store = opened(disk, StoreSettings(default_queues=1, timer_queues=1))
    fields = {"delays_ms": struct.pack("<2q", 5, 5)} if timed else {}
    at = [store.send(batch([b"%d" % n, b"x"], **fields), NOW_MS).stored.position for n in range(6)]
    settle(store)
    if saved:
        save(store, disk)
    name = TIMER_TOPIC if timed else "orders"
    disk.flip(f"{DATA}/commitlog/{'0' * 20}", at[3] + 120, 3)
    with pytest.raises(Corrupt, match=f"set-aside .* --at {at[3]}"):
        reader.read_frames(store.log, store.queue(name, 0), 6, 1)
    disk = disk.after_kill()
    with pytest.raises(CorruptLog, match="set-aside"):
        opened(disk)
    set_aside.set_aside(f"{DATA}/commitlog", at[3], disk)
    disk = disk.after_kill()
    store = opened(disk)
    queue = store.queue(name, 0)
    assert queue.max_offset == 12
    save(store, disk)
    findings = [*check_log(f"{DATA}/commitlog", disk), *check_consume_queues(DATA, disk)]
    assert not [each.text for each in findings if each.damage]
    offset, found = 0, 0
    while offset < 12:
        frames = reader.read_frames(store.log, queue, offset, 1 << 20)
        found += len(frames.slices)
        offset = frames.next_offset
    assert found == 5
    pulled = reader.read_records(store.log, queue, 0, 100, 1 << 20)
    assert (pulled.records, pulled.next_offset) == (10, 12)
    assert sum(map(len, pulled.slices)) == pulled.size
    tagged = reader.read_records(store.log, queue, 6, 100, 1 << 20, frozenset([0]))
    assert (tagged.records, tagged.next_offset) == (4, 12)
    alone = reader.read_records(store.log, queue, 6, 2, 1 << 20)
    assert (alone.records, alone.next_offset) == ((0, 8) if saved else (2, 10))


def test_offsets_of_what_was_set_aside_are_not_given_again_where_nothing_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who has consumed it would never see what came there; nobody knows whose they were."""
    disk = FaultyDisk()
    store = opened(disk)
    for queue_id in (0, 1, 0):
        last = store.send(batch([b"a", b"b"], queue_id=queue_id), NOW_MS).stored
        if queue_id == 1:
            at = last.position
    settle(store)
    disk.flip(f"{DATA}/commitlog/{'0' * 20}", at + 120, 3)
    disk = disk.after_kill()
    set_aside.set_aside(f"{DATA}/commitlog", at, disk)
    ends = []
    for _ in range(2):
        store = opened(disk)
        ends.append([queue.next_offset for queue in store.queues_of("orders")])
        disk = disk.after_kill()
    assert ends[0] == ends[1]
    assert ends[0][0] == 4  # what lies behind says it
    assert ends[0][1] >= 2
    assert "not given again" in caplog.text
    assert "the log ends" not in caplog.text  # it has lost nothing of its end
    quiet = store.queue("orders", 1)
    assert store.send(batch([b"c"], queue_id=1), NOW_MS).stored.base_offset == ends[0][1]
    settle(store)
    assert quiet.records_from(0) == 1


def test_what_was_set_aside_as_one_with_what_a_checkpoint_knows_is_not_given_again() -> None:
    """A bad sector may take several entries, of which the checkpoint was made between two."""
    disk = FaultyDisk()
    store = opened(disk)
    worn = [store.send(batch([b"a", b"b"]), NOW_MS).stored.position]
    settle(store)
    save(store, disk)
    worn.append(store.send(batch([b"c", b"d"], queue_id=1), NOW_MS).stored.position)
    store.send(batch([b"e"]), NOW_MS)
    settle(store)
    for at in worn:
        disk.overwrite(f"{DATA}/commitlog/{'0' * 20}", at, bytes(40))
    disk = disk.after_kill()
    set_aside.set_aside(f"{DATA}/commitlog", worn[0], disk)
    store = opened(disk)
    assert store.queue("orders", 0).next_offset == 3
    assert store.queue("orders", 1).next_offset >= 2


@pytest.mark.parametrize("kind", [epoch.KIND, 40])
def test_a_start_passes_over_what_replication_wrote(kind: int) -> None:
    disk = FaultyDisk()
    store = opened(disk)
    store.log.append(kind, [epoch.encode(1, bytes(16), NOW_MS)])
    settle(store)
    again = opened(disk.after_kill())
    assert again.topics.find(TIMER_TOPIC) == store.topics.find(TIMER_TOPIC)
    assert again.log.end_position == store.log.end_position


def test_a_start_refuses_an_entry_that_it_does_not_know() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    store.log.append(31, [b""])
    settle(store)
    with pytest.raises(InvariantError, match="unknown kind 31"):
        opened(disk.after_kill())
