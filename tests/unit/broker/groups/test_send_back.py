"""Send-backs on a store on a disk in memory: no thread, no loop, no clock."""

import struct

import pytest

from duemq.errors import (
    Corrupt,
    DuemqError,
    FencedMember,
    InvalidArgument,
    OffsetOutOfRange,
    Overloaded,
    PermissionDenied,
    QueueNotFound,
    ReadOnly,
    TopicNotFound,
)
from duemq.protocol import names
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.protocol.names import TIMER_TOPIC
from duemq.protocol.retry_policy import RetryPolicy
from duemq_server.broker.groups.progress import retries_waiting
from duemq_server.broker.groups.send_back import FailedMessage, Outcome, SendBacks, SentBack
from duemq_server.broker.reading import reader
from duemq_server.broker.reading.reader import StoredRecord
from duemq_server.broker.records import retry_record
from duemq_server.broker.records.batch import BatchLimits
from duemq_server.broker.records.retry_record import MessagePlace, Story
from duemq_server.broker.store import offsets, recovery
from duemq_server.broker.store.changes import group_changes, offset_changes
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage import frame
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch, entry, record
from tests.unit.broker.store.test_store import DATA, opened, save, settle

NOW_MS = 1_000_000
GROUP = "billing"
RETRY, DEAD = names.retry_topic(GROUP), names.dead_letter_topic(GROUP)
KEY = GroupQueue(GROUP, "orders", 0)
STORE_SETTINGS = StoreSettings(default_queues=2, timer_queues=4)


def filled(disk: FaultyDisk, settings: StoreSettings = STORE_SETTINGS) -> Store:
    store = opened(disk, settings)
    store.send(batch([b"m%d" % number for number in range(10)], tags=["t"] * 10), NOW_MS)
    settle(store)
    return store


def sent_back(store: Store, *failures: FailedMessage, now_ms: int = NOW_MS) -> list[Outcome]:
    """As the service does it."""
    core = SendBacks(store, "b1")
    places = []
    for failure in failures:
        try:
            queue = core.check(failure)
        except DuemqError:
            queue = None
        places.append((queue or store.queue("orders", 0), failure.offset if queue else 0))
    records = reader.read_each(store.log, places, 1 << 24)
    outcomes, end = core.store(GROUP, failures, records, now_ms)
    assert end <= store.log.end_position
    settle(store)
    return outcomes


def frames(store: Store, topic: str) -> list[frame.Frame]:
    """In the order in which they were stored."""
    found = {}
    for queue in store.queues_of(topic):
        at = queue.min_offset
        while at < queue.max_offset:
            position = queue.frame_at(at)
            found[position] = frame.decode(store.log.read_entry(position).body)
            at = found[position].end_offset
    return [found[position] for position in sorted(found)]


def entries(each: frame.Frame) -> list[bytes]:
    found, at = [], 0
    for size in each.sizes.tolist():
        found.append(bytes(each.payload[at : at + size]))
        at += size
    return found


def fired(store: Store, number: int = 0) -> int:
    """What the timer service does with a frame that is due; the offset in the target."""
    timed = frames(store, TIMER_TOPIC)[number]
    made = batch([b"x"], topic=timed.target_topic, producer_id=SERVICE_IDS_FROM, sequence=number)
    made.records = bytes(timed.payload)
    made.sizes = timed.sizes.tobytes()
    made.tag_hashes = timed.tag_hashes.tobytes()
    made.key_hashes = timed.key_hashes.tobytes()
    accepted = store.send(made, NOW_MS)
    settle(store)
    return accepted.stored.base_offset


def errors_of(outcomes: list[Outcome]) -> list[type]:
    return [type(outcome) for outcome in outcomes]


def test_messages_of_one_request_lie_in_one_frame_and_are_settled() -> None:
    store = filled(FaultyDisk())
    outcomes = sent_back(
        store,
        FailedMessage(KEY, 3, error="boom"),
        FailedMessage(KEY, 5, delay_ms=7),
        FailedMessage(KEY, 4),
    )
    dues = [NOW_MS + 10_000, NOW_MS + 7, NOW_MS + 10_000]
    assert outcomes == [SentBack(due_ms=due) for due in dues]
    [timed] = frames(store, TIMER_TOPIC)
    assert (timed.send_back, timed.timed, timed.count) == (True, True, 3)
    assert (timed.target_topic, timed.target_queue_id) == (RETRY, 0)
    assert timed.due_ms.tolist() == dues
    assert timed.tag_hashes.tolist() == [store.queue("orders", 0).entry(0)[3]] * 3
    assert list(store.offsets.settled(KEY)) == [3, 4, 5]
    attempt, story = retry_record.read(retry_record.content(entries(timed)[0]))
    place = MessagePlace("orders", "b1", 0, 3)
    assert attempt == 1
    assert story == Story(GROUP, place, NOW_MS, NOW_MS, "boom", place)
    assert len(store.queues_of(RETRY)) == 1
    assert (store.sent_back.of(GROUP), retries_waiting(store, GROUP)) == (3, 3)


def test_the_retry_topic_is_there_before_the_first_retry_and_without_auto_create() -> None:
    store = opened(FaultyDisk(), StoreSettings(auto_create_topics=False, default_queues=2))
    store.create_topic("orders")
    store.send(batch([b"a"]), NOW_MS)
    settle(store)
    reported: list[bool] = []
    store.on_report = lambda: reported.append(RETRY in store.topics)
    assert sent_back(store, FailedMessage(KEY, 0)) == [SentBack(due_ms=NOW_MS + 10_000)]
    assert reported == [True]
    assert sent_back(store, FailedMessage(KEY, 0, dead_letter=True)) == [SentBack(duplicate=True)]
    assert DEAD not in store.topics


def test_a_dead_letter_waits_for_nothing() -> None:
    store = filled(FaultyDisk())
    outcomes = sent_back(
        store, FailedMessage(KEY, 0, dead_letter=True), FailedMessage(KEY, 1, deliveries=17)
    )
    assert outcomes == [SentBack(dead_letter=True)] * 2
    [stored] = frames(store, DEAD)
    assert (stored.send_back, stored.timed, stored.count) == (True, False, 2)
    assert [retry_record.read(retry_record.content(each))[0] for each in entries(stored)] == [1, 17]
    assert frames(store, TIMER_TOPIC) == []
    assert list(store.offsets.settled(KEY)) == [0, 1]
    assert (store.dead_letters.of(GROUP), retries_waiting(store, GROUP)) == (2, 0)


def test_seventeen_deliveries_then_a_dead_letter() -> None:
    store = filled(FaultyDisk())
    key, offset, now_ms = KEY, 0, NOW_MS
    for delivered in range(1, 20):
        [outcome] = sent_back(
            store, FailedMessage(key, offset, error=f"no {delivered}"), now_ms=now_ms
        )
        assert isinstance(outcome, SentBack)
        if outcome.dead_letter:
            break
        now_ms = outcome.due_ms
        key, offset = GroupQueue(GROUP, RETRY, 0), fired(store, delivered - 1)
    assert delivered == 17
    assert now_ms - NOW_MS == 17_140_000
    [stored] = frames(store, DEAD)
    attempt, story = retry_record.read(retry_record.content(entries(stored)[0]))
    assert attempt == 17
    assert story == Story(
        GROUP,
        origin=MessagePlace("orders", "b1", 0, 0),
        first_failed_ms=NOW_MS,
        last_failed_ms=now_ms,
        error="no 17",
        source=MessagePlace(RETRY, "b1", 0, 15),
    )
    assert retries_waiting(store, GROUP) == 0


def test_a_consumer_that_miscounts_gets_no_more_deliveries() -> None:
    store = filled(FaultyDisk())
    group_changes.put(store, GroupConfig(GROUP, RetryPolicy(1, (0,))))
    assert sent_back(store, FailedMessage(KEY, 0, deliveries=1)) == [SentBack(due_ms=NOW_MS)]
    fired(store)
    again = FailedMessage(GroupQueue(GROUP, RETRY, 0), 0, deliveries=1)
    assert sent_back(store, again) == [SentBack(dead_letter=True)]


def test_a_group_without_retries_has_dead_letters_at_once() -> None:
    store = filled(FaultyDisk())
    group_changes.put(store, GroupConfig(GROUP, RetryPolicy(0)))
    assert sent_back(store, FailedMessage(KEY, 0, delay_ms=5)) == [SentBack(dead_letter=True)]


def test_the_story_of_another_group_is_not_continued() -> None:
    """A group that consumes another's dead letters begins anew."""
    store = filled(FaultyDisk())
    sent_back(store, FailedMessage(KEY, 0, dead_letter=True, deliveries=9))
    key = GroupQueue("repair", DEAD, 0)
    records = reader.read_each(store.log, [(store.queue(DEAD, 0), 0)], 1 << 20)
    [outcome], _ = SendBacks(store, "b1").store(
        "repair", [FailedMessage(key, 0)], records, NOW_MS + 5
    )
    assert outcome == SentBack(due_ms=NOW_MS + 5 + 10_000)
    settle(store)
    [timed] = frames(store, TIMER_TOPIC)
    place = MessagePlace(DEAD, "b1", 0, 0)
    assert retry_record.read(retry_record.content(entries(timed)[0])) == (
        1,
        Story("repair", place, NOW_MS + 5, NOW_MS + 5, "", place),
    )


def test_what_never_was_is_no_duplicate() -> None:
    store = filled(FaultyDisk())
    offset_changes.put(store, GROUP, [(KEY, GroupOffset(2, 0))])
    assert errors_of(sent_back(store, FailedMessage(KEY, -1))) == [OffsetOutOfRange]


def test_what_the_group_is_done_with_is_a_duplicate_and_costs_no_log() -> None:
    store = filled(FaultyDisk())
    offset_changes.put(store, GROUP, [(KEY, GroupOffset(2, 7))])
    sent_back(store, FailedMessage(KEY, 5, generation=7))
    end = store.log.end_position
    outcomes = sent_back(
        store,
        FailedMessage(KEY, 5, generation=7),
        FailedMessage(KEY, 5, generation=7, dead_letter=True),
        FailedMessage(KEY, 1, generation=7),
        FailedMessage(KEY, 0),
    )
    assert outcomes == [SentBack(duplicate=True)] * 4
    assert store.log.end_position == end
    assert list(store.offsets.settled(KEY)) == [5]


def test_a_message_that_is_twice_in_a_request_is_stored_once() -> None:
    store = filled(FaultyDisk())
    outcomes = sent_back(store, FailedMessage(KEY, 5), FailedMessage(KEY, 5, dead_letter=True))
    assert outcomes == [SentBack(due_ms=NOW_MS + 10_000), SentBack(duplicate=True)]
    assert [each.count for each in frames(store, TIMER_TOPIC)] == [1]


def test_a_repeat_while_the_record_was_read_is_found_at_the_append() -> None:
    store = filled(FaultyDisk())
    core = SendBacks(store, "b1")
    failure = FailedMessage(KEY, 5)
    queue = core.check(failure)
    assert queue is not None
    assert core.check(failure) is queue  # both are read now
    records = reader.read_each(store.log, [(queue, 5)], 1 << 20)
    first, _ = core.store(GROUP, [failure], records, NOW_MS)
    end = store.log.end_position
    second, settled = core.store(GROUP, [failure], records, NOW_MS)
    assert (first, second) == ([SentBack(due_ms=NOW_MS + 10_000)], [SentBack(duplicate=True)])
    assert settled == store.log.end_position == end  # the answer waits for the first one's


def test_a_message_cannot_be_sent_back_by_who_lost_the_queue() -> None:
    store = filled(FaultyDisk())
    offset_changes.put(store, GROUP, [(KEY, GroupOffset(0, 7))])
    [outcome] = sent_back(store, FailedMessage(KEY, 5, generation=6))
    assert isinstance(outcome, FencedMember)
    assert outcome.limit == "7"
    assert errors_of(sent_back(store, FailedMessage(KEY, 5, generation=7))) == [SentBack]


def test_each_illegal_message_has_its_own_error_and_the_others_are_stored() -> None:
    store = filled(FaultyDisk())
    outcomes = sent_back(
        store,
        FailedMessage(KEY, 10),
        FailedMessage(KEY, -1),
        FailedMessage(KEY._replace(queue_id=2), 0),
        FailedMessage(KEY._replace(topic="nowhere"), 0),
        FailedMessage(KEY, 0, delay_ms=-1),
        FailedMessage(KEY, 0, deliveries=-1),
        FailedMessage(KEY, 0, generation=-1),
        FailedMessage(KEY, 9),
    )
    assert errors_of(outcomes) == [
        OffsetOutOfRange,
        OffsetOutOfRange,
        QueueNotFound,
        TopicNotFound,
        InvalidArgument,
        InvalidArgument,
        InvalidArgument,
        SentBack,
    ]
    assert list(store.offsets.settled(KEY)) == [9]


def test_a_record_that_cannot_be_read_or_is_none_is_its_own_error() -> None:
    store = filled(FaultyDisk())
    core = SendBacks(store, "b1")
    good = reader.read_each(store.log, [(store.queue("orders", 0), 2)], 1 << 20)
    outcomes, _ = core.store(
        GROUP,
        [FailedMessage(KEY, 0), FailedMessage(KEY, 1), FailedMessage(KEY, 2)],
        [Corrupt("bad block"), StoredRecord(memoryview(b"\x0a\x02\x08"), 0, 0), *good],
        NOW_MS,
    )
    assert errors_of(outcomes) == [Corrupt, Corrupt, SentBack]
    assert list(store.offsets.settled(KEY)) == [2]


def test_a_full_disk_settles_nothing() -> None:
    store = filled(FaultyDisk())
    store.read_only = True
    outcomes = sent_back(store, FailedMessage(KEY, 0), FailedMessage(KEY, 1, dead_letter=True))
    assert errors_of(outcomes) == [ReadOnly, ReadOnly]
    assert not store.offsets.settled(KEY)
    assert RETRY not in store.topics
    store.read_only = False
    assert errors_of(sent_back(store, FailedMessage(KEY, 0))) == [SentBack]


def test_the_number_of_settled_offsets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "SETTLED_QUEUE_MAX", 3)
    store = filled(FaultyDisk())
    sent_back(store, FailedMessage(KEY, 9))
    outcomes = sent_back(store, *(FailedMessage(KEY, offset) for offset in range(5)))
    assert errors_of(outcomes) == [SentBack, SentBack, Overloaded, Overloaded, Overloaded]
    offset_changes.put(store, GROUP, [(KEY, GroupOffset(2, 0))])
    assert errors_of(sent_back(store, FailedMessage(KEY, 2))) == [SentBack]


def test_an_error_text_is_cut() -> None:
    store = filled(FaultyDisk())
    sent_back(store, FailedMessage(KEY, 0, error="€" * 5_000))
    [timed] = frames(store, TIMER_TOPIC)
    _, story = retry_record.read(retry_record.content(entries(timed)[0]))
    assert story is not None
    assert story.error == "€" * 1_024


def test_a_message_at_its_limits_is_retried_whatever_they_are_later() -> None:
    disk = FaultyDisk()
    limits = BatchLimits(
        message_bytes_max=10_000, batch_bytes_max=10_100, properties_bytes_max=5_000
    )
    store = opened(disk, StoreSettings(default_queues=2, limits=limits))
    made = entry(record(bytes(10_000)))
    sent = batch([b"x"])
    sent.records, sent.sizes = made, struct.pack("<I", len(made))
    store.send(sent, NOW_MS)
    settle(store)
    sent_back(store, FailedMessage(KEY, 0, delay_ms=0, error="x" * 1_024))
    smaller = StoreSettings(default_queues=2, limits=BatchLimits(100, 100, 1))
    for each in (store, opened(disk, smaller)):
        fired(each)
        queue = each.queue(RETRY, 0)
        assert queue.max_offset == 1
        # and again from there
        key = GroupQueue(GROUP, RETRY, 0)
        assert errors_of(sent_back(each, FailedMessage(key, 0, dead_letter=True))) == [SentBack]


def test_only_services_write_to_retry_topics() -> None:
    store = filled(FaultyDisk())
    for topic in (RETRY, DEAD, names.retry_topic("other")):
        with pytest.raises(PermissionDenied):
            store.send(batch([b"forged"], topic=topic, producer_id=SERVICE_IDS_FROM - 1), NOW_MS)
    assert names.retry_topic("other") not in store.topics


def test_groups_are_spread_over_the_timer_queues() -> None:
    store = filled(FaultyDisk())
    core = SendBacks(store, "b1")
    for number in range(20):
        group = f"g{number}"
        key = GroupQueue(group, "orders", 0)
        records = reader.read_each(store.log, [(store.queue("orders", 0), 0)], 1 << 20)
        core.store(group, [FailedMessage(key, 0, delay_ms=number % 2 * 3_600_000)], records, NOW_MS)
    assert all(queue.next_offset for queue in store.queues_of(TIMER_TOPIC))


def test_it_is_all_known_again_after_a_start() -> None:
    disk = FaultyDisk()
    store = filled(disk)
    group_changes.put(store, GroupConfig(GROUP, RetryPolicy(3)))
    sent_back(store, FailedMessage(KEY, 1), FailedMessage(KEY, 3))
    save(store, disk)
    sent_back(store, FailedMessage(KEY, 5), FailedMessage(KEY, 7, dead_letter=True))
    offset_changes.put(store, GROUP, [(KEY, GroupOffset(2, 4))])
    settle(store)
    for _ in range(2):
        again = opened(disk)
        assert list(again.offsets.settled(KEY)) == [3, 5, 7]
        assert retries_waiting(again, GROUP) == 3
        assert again.groups.effective(GROUP).retry.retries_max == 3
        assert (
            sent_back(again, FailedMessage(KEY, 3), FailedMessage(KEY, 7))
            == [SentBack(duplicate=True)] * 2
        )
        disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")  # and from the whole log
        save(again, disk)


def test_lost_consume_queues_do_not_count_retries_twice() -> None:
    disk = FaultyDisk()
    store = filled(disk)
    sent_back(store, FailedMessage(KEY, 1), FailedMessage(KEY, 3))
    offset_changes.put(store, GROUP, [(KEY, GroupOffset(2, 4))])
    save(store, disk)
    for path in list(disk.paths):
        if "consumequeue" in path:
            disk.unlink(path)
    again = opened(disk)
    assert list(again.offsets.settled(KEY)) == [3]
    assert retries_waiting(again, GROUP) == 2


def test_a_reset_delivers_again_what_was_settled() -> None:
    disk = FaultyDisk()
    store = filled(disk)
    offset_changes.put(store, GROUP, [(KEY, GroupOffset(6, 4))])
    sent_back(store, FailedMessage(KEY, 8))
    offset_changes.reset(store, GROUP, [(KEY, 2)])
    settle(store)
    for each in (store, opened(disk)):
        assert each.offsets.find(KEY) == GroupOffset(2, 5)
        assert not each.offsets.settled(KEY)
        with pytest.raises(FencedMember):
            each.offsets.check_fence(KEY, 4)
    assert errors_of(sent_back(store, FailedMessage(KEY, 8))) == [SentBack]


def test_a_deleted_topic_has_nothing_settled() -> None:
    disk = FaultyDisk()
    store = filled(disk)
    sent_back(store, FailedMessage(KEY, 8))
    store.delete_topic("orders")
    store.send(batch([b"new"] * 10), NOW_MS)
    settle(store)
    for each in (store, opened(disk)):
        assert not each.offsets.settled(KEY)
        assert not group_changes.knows(each, GROUP)


def test_a_deleted_group_is_forgotten_and_its_dead_letters_stay() -> None:
    disk = FaultyDisk()
    store = filled(disk)
    group_changes.put(store, GroupConfig(GROUP, RetryPolicy(3)))
    sent_back(store, FailedMessage(KEY, 1), FailedMessage(KEY, 2, dead_letter=True))
    save(store, disk)
    group_changes.delete(store, GROUP)
    settle(store)
    assert not [*store.sent_back, *store.dead_letters]  # of which only so many groups are counted
    for each in (store, opened(disk)):
        assert not group_changes.knows(each, GROUP)
        assert not each.offsets.settled(KEY)
        assert each.groups.effective(GROUP).retry.retries_max == 16
        assert RETRY not in each.topics
        assert DEAD in each.topics
        assert retries_waiting(each, GROUP) == 0
    # A new life.
    assert errors_of(sent_back(store, FailedMessage(KEY, 1))) == [SentBack]
    assert retries_waiting(opened(disk), GROUP) == 1
