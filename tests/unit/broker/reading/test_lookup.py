"""Look-ups on a disk in memory, against a walk over all that was stored."""

import struct
import zlib
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import Corrupt, InvalidArgument, Unavailable
from duemq.protocol.record_bytes import text_hash
from duemq.v1 import message_pb2
from duemq_server.broker.reading import lookup, time_search
from duemq_server.broker.reading.lookup import Cursor, LookupStart, MessageQuery
from duemq_server.broker.store import recovery
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.errors import CorruptFile
from duemq_server.storage.tools import set_aside
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import FakeBatch

# Two words with one CRC-32.
COLLIDING = ("plumless", "buckeroo")
KEYS = ("", "a", *COLLIDING)


class Stored(NamedTuple):
    queue_id: int
    offset: int
    store_ms: int
    record: message_pb2.Record


# A batch: queue, milliseconds since the one before, key and body size of each record.
batches_strategy = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 2),
        st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 300)), min_size=1, max_size=6),
    ),
    max_size=12,
)


def settle(store: Store) -> None:
    while store.log.write_pending():
        pass
    store.durable(store.log.durable_position)


def batch_of(queue_id: int, records: list[message_pb2.Record]) -> FakeBatch:
    entries = [message_pb2.RecordBatch(records=[record]).SerializeToString() for record in records]
    count = len(entries)
    keys = (text_hash(record.key.encode()) for record in records)
    return FakeBatch(
        queue_id=queue_id,
        records=b"".join(entries),
        sizes=struct.pack(f"<{count}I", *map(len, entries)),
        tag_hashes=bytes(4 * count),
        key_hashes=struct.pack(f"<{count}I", *keys),
    )


def filled(
    batches: list[tuple[int, int, list[tuple[str, int]]]], disk: FaultyDisk | None = None
) -> tuple[Store, list[Stored]]:
    """A store, and what it has of `orders` in the order queue, offset."""
    settings = StoreSettings(default_queues=2, timer_queues=1)
    store = recovery.open_store(
        "/data", disk or FaultyDisk(), settings, segment_bytes=1 << 16
    ).store
    store.create_topic("orders", 2)
    stored: list[Stored] = []
    now_ms = 1_000
    for queue_id, later_ms, wanted in batches:
        now_ms += later_ms
        number = len(stored)
        records = [
            message_pb2.Record(
                message_id=f"id-{number + index}",
                key=key,
                # Every body says the id of another message, as its field is encoded.
                body=lookup.message_id_field(f"id-{number + index + 1}") + bytes(size),
            )
            for index, (key, size) in enumerate(wanted)
        ]
        accepted = store.send(batch_of(queue_id, records), now_ms)
        stored += [
            Stored(queue_id, accepted.stored.base_offset + index, now_ms, record)
            for index, record in enumerate(records)
        ]
        settle(store)
    return store, sorted(stored, key=lambda each: each[:2])


def record_of(entry: memoryview | bytes) -> message_pb2.Record:
    return message_pb2.RecordBatch.FromString(bytes(entry)).records[0]


def entry_of(record: message_pb2.Record) -> bytes:
    return message_pb2.RecordBatch(records=[record]).SerializeToString()


def by_key(key: str, **times: int) -> MessageQuery:
    return MessageQuery(
        **times, key_hash=text_hash(key.encode()), matches=lambda e: record_of(e).key == key
    )


def by_id(message_id: str, **times: int) -> MessageQuery:
    return MessageQuery(
        **times,
        needle=lookup.message_id_field(message_id),
        matches=lambda e: record_of(e).message_id == message_id,
    )


def walk(store: Store, query: MessageQuery, records_max: int = 3, **bounds: int) -> list[Stored]:
    found: list[Stored] = []
    walk_into(found, store, query, records_max, **bounds)
    return found


def walk_into(
    found: list[Stored], store: Store, query: MessageQuery, records_max: int = 3, **bounds: int
) -> None:
    """All steps; none may stand still."""
    place: LookupStart | None = LookupStart(0, 0)
    while place is not None:
        step = lookup.search(
            store.log, store.queues_of("orders"), query, place, records_max, **bounds
        )
        assert len(step.found) <= records_max
        found += [
            Stored(each.queue_id, each.offset, each.store_ms, record_of(each.entry))
            for each in step.found
        ]
        assert step.following is None or step.following.unread or step.following > place
        cursor = step.following and lookup.encode_cursor(Cursor(7, step.following))
        topic_id, place = lookup.decode_cursor(cursor) if cursor else (7, None)
        assert topic_id == 7


bounds_strategy = st.fixed_dictionaries(
    {
        "entries": st.sampled_from([1, 3, 1_000]),
        "log_bytes": st.sampled_from([1, 10_000, 1 << 20]),
        "answer_bytes": st.sampled_from([1, 400, 1 << 20]),
    }
)


@given(batches_strategy, st.sampled_from(KEYS[1:]), st.integers(999, 1_020), bounds_strategy)
def test_by_key_whatever_the_bounds(batches, key, to_ms, bounds) -> None:
    store, stored = filled(batches)
    wanted = [each for each in stored if each.record.key == key]
    assert walk(store, by_key(key), **bounds) == wanted
    early = [each for each in wanted if each.store_ms < to_ms]
    assert walk(store, by_key(key, to_ms=to_ms), **bounds) == early


@given(batches_strategy, st.integers(0, 20), st.integers(999, 1_020), bounds_strategy)
def test_by_id_whatever_bodies_hold(batches, number, from_ms, bounds) -> None:
    store, stored = filled(batches)
    wanted = [each for each in stored if each.record.message_id == f"id-{number}"]
    assert walk(store, by_id(f"id-{number}"), **bounds) == wanted
    late = [each for each in wanted if each.store_ms >= from_ms]
    assert walk(store, by_id(f"id-{number}", from_ms=from_ms), **bounds) == late


@given(batches_strategy, st.integers(999, 1_020), st.integers(999, 1_020), bounds_strategy)
def test_by_time(batches, from_ms, to_ms, bounds) -> None:
    store, stored = filled(batches)
    query = MessageQuery(from_ms=from_ms, to_ms=to_ms)
    assert walk(store, query, **bounds) == [
        each for each in stored if from_ms <= each.store_ms < to_ms
    ]


@given(batches_strategy, st.integers(995, 1_030))
def test_the_first_stored_since(batches, at_ms) -> None:
    store, stored = filled(batches)
    for queue in store.queues_of("orders"):
        times = [each.store_ms for each in stored if each.queue_id == queue.queue_id]
        assert time_search.first_stored_since(queue, at_ms) == sum(t < at_ms for t in times)


def test_words_that_collide_do() -> None:
    assert len({zlib.crc32(word.encode()) for word in COLLIDING}) == 1


def test_a_cold_start_finds_the_same() -> None:
    disk = FaultyDisk()
    batches = [(number % 2, 1, [(KEYS[number % 4], 100)]) for number in range(40)]
    store, stored = filled(batches, disk)
    store.close()
    again = recovery.open_store(
        "/data", disk, StoreSettings(default_queues=2, timer_queues=1)
    ).store
    wanted = [each for each in stored if each.record.key == COLLIDING[0]]
    assert walk(again, by_key(COLLIDING[0])) == wanted


def test_what_retention_removed_is_stepped_over() -> None:
    store, stored = filled([(0, 1, [("a", 8_000)]) for _ in range(30)])
    store.tables.drop_before(store.queue("orders", 0).frame_at(20))
    store.log.delete_before(store.queue("orders", 0).frame_at(20))
    assert walk(store, by_key("a")) == stored[20:]
    assert time_search.first_stored_since(store.queue("orders", 0), 0) == 20


def test_a_topic_that_is_deleted_meanwhile_has_no_first() -> None:
    disk = FaultyDisk()
    store, _ = filled([(0, 1, [("a", 10)]) for _ in range(30)], disk)
    [queue, *_] = store.queues_of("orders")
    queue.sync()
    store.delete_topic("orders")
    store.tables.erase_deleted(store.freeze()())
    assert time_search.first_stored_since(queue, 1_005) == queue.max_offset


@given(bounds_strategy)
def test_a_queue_that_cannot_be_read_comes_last(bounds) -> None:
    disk = FaultyDisk()
    store, stored = filled([(number % 2, 1, [("a", 100)]) for number in range(20)], disk)
    queues = store.queues_of("orders")
    queues[0].sync()
    [path] = [each for each in disk.paths if "/orders." in each and "/0/" in each]
    disk.chop(path, 0)
    found: list[Stored] = []
    with pytest.raises(CorruptFile, match=path):
        walk_into(found, store, by_key("a"), **bounds)
    assert found == [each for each in stored if each.queue_id == 1]


@given(bounds_strategy, st.sampled_from([1, 3, 1_000]))
def test_a_damaged_frame_hides_what_lies_behind_it_in_its_queue_alone(bounds, records_max) -> None:
    disk = FaultyDisk()
    store, stored = filled([(number % 2, 1, [("a", 100)]) for number in range(20)], disk)
    disk.flip("/data/commitlog/00000000000000000000", store.queue("orders", 0).frame_at(5) + 40)
    found: list[Stored] = []
    with pytest.raises(Corrupt):
        walk_into(found, store, by_key("a"), records_max, **bounds)
    assert found == [each for each in stored if each.queue_id == 1 or each.offset < 5]


@pytest.mark.parametrize("query", [by_key("a"), by_id("id-18"), MessageQuery(from_ms=1)])
def test_what_was_set_aside_is_passed_over_unless_it_is_asked_for(query: MessageQuery) -> None:
    disk = FaultyDisk()
    store, stored = filled([(0, 1, [("a", 100)]) for _ in range(20)], disk)
    position = store.queue("orders", 0).frame_at(5)
    disk.flip("/data/commitlog/00000000000000000000", position + 40)
    set_aside.set_aside("/data/commitlog", position, disk)
    assert walk(store, query) == [
        each for each in stored if each.offset != 5 and query.matches(entry_of(each.record))
    ]
    with pytest.raises(Corrupt):
        lookup.search(store.log, store.queues_of("orders"), MessageQuery(), LookupStart(0, 5), 1)


def test_a_queue_that_can_be_read_again_does_not_stand_for_the_others() -> None:
    """It may be one of several that could not be read."""
    store, _ = filled([(number % 2, 1, [("a", 100)]) for number in range(20)])
    with pytest.raises(Unavailable):
        lookup.search(
            store.log, store.queues_of("orders"), by_key("a"), LookupStart(0, 4, (0, 4)), 3
        )


GIVEN = lookup.encode_cursor(Cursor(7, LookupStart(1, 2)))


@pytest.mark.parametrize("cursor", [b"", b"x", bytes(17), GIVEN[::-1], GIVEN[:-1]])
def test_a_cursor_that_was_never_given_is_refused(cursor: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        lookup.decode_cursor(cursor)
    assert caught.value.field == "cursor"


def test_a_cursor_of_an_older_broker_names_no_topic() -> None:
    for body, place in (
        (struct.pack("<Biq", 1, 3, 4), LookupStart(3, 4)),
        (struct.pack("<Biqiq", 2, 3, 4, 5, 6), LookupStart(3, 4, (5, 6))),
    ):
        given = body + struct.pack("<I", zlib.crc32(body))
        assert lookup.decode_cursor(given) == Cursor(0, place)


def test_a_long_message_id_is_said_as_protobuf_says_it() -> None:
    for length in (1, 64, 127, 128, 255):
        text = "x" * length
        assert (
            lookup.message_id_field(text) == message_pb2.Record(message_id=text).SerializeToString()
        )
