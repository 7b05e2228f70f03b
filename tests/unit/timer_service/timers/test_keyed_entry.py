import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duemq.v1 import message_pb2
from duemq_server.timer_service.timers import keyed_entry, log_entries
from duemq_server.timer_service.timers.key_hash import hash_of, key_in
from duemq_server.timer_service.timers.keyed import EXISTS, REPLACED, SCHEDULED, Handle, TimerKey
from duemq_server.timer_service.timers.keyed_entry import CANCELLED, Changed, RequestKey, Result
from duemq_server.timer_service.timers.log_entries import SourceId

SOURCE = SourceId((1 << 63) | 7, 3)
OTHER = SourceId(5, 0)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def handle(offset: int) -> Handle:
    return Handle(OTHER, offset, 1_000 + offset)


def hashes(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_an_entry_says_what_goes_and_what_comes() -> None:
    changed = Changed(
        RequestKey(bytes(range(16)), 2),
        1_234,
        [handle(1)],
        hashes(11),
        [handle(2), handle(3)],
        SOURCE,
        ["", "broker-ä"],
        hashes(21, 0, (1 << 64) - 1),
        b"frames",
        b"answer",
    )
    parts = keyed_entry.encode(changed)

    found = keyed_entry.decode(memoryview(b"".join(bytes(part) for part in parts)))

    assert found.frames_at == len(parts[0])
    assert found.frames_at % 8 == 0
    assert bytes(found.frames) == changed.frames
    for name in ("cancelled_hashes", "hashes"):
        assert getattr(found, name).tolist() == getattr(changed, name).tolist()
    for name in ("request", "at_ms", "cancelled", "replaced", "source", "brokers", "answer"):
        assert getattr(found, name) == getattr(changed, name), name


def test_what_goes_may_be_told_in_columns() -> None:
    plain = Changed(
        RequestKey(bytes(16)),
        1_234,
        (),
        hashes(),
        [handle(2), Handle(SOURCE, 1, 9)],
        SOURCE,
        [""],
        hashes(0, 5),
        b"frames",
        b"",
        topics=[77, 77],
    )
    table = log_entries.cancelled_table(
        [SOURCE, OTHER],
        np.array([1, 0], dtype=np.uint32),
        np.array([2, 1]),
        np.array([1_002, 9]),
        77,
    )
    columns = plain._replace(replaced=(), topics=(), table=table)
    assert keyed_entry.encode(columns) == keyed_entry.encode(plain)

    body = memoryview(b"".join(bytes(part) for part in keyed_entry.encode(columns)))
    found = keyed_entry.decode(body, in_columns=True)

    assert found.table is not None
    assert found.table.tolist() == table.tolist()
    assert (found.replaced, found.hashes.tolist()) == ([], [0, 5])


def test_an_answer_is_read_as_it_was_written() -> None:
    results = [
        Result(SCHEDULED, (handle(1),)),
        Result(REPLACED, (handle(2), handle(3))),
        Result(EXISTS, (handle(4),)),
        Result(CANCELLED),
    ]
    for times in (1, 500):
        assert keyed_entry.decode_answer(keyed_entry.encode_answer(times * results)) == (
            times * results
        )


def test_a_long_answer_is_small() -> None:
    results = [Result(SCHEDULED, (handle(n),)) for n in range(1_000)]

    assert len(keyed_entry.encode_answer(results)) < 10_000


def test_the_hash_of_a_key_is_what_it_always_was() -> None:
    assert hash_of(TimerKey("orders", "4711")) == 0xE48F37BFD6C5D011
    assert hash_of(TimerKey("a", "bc")) != hash_of(TimerKey("ab", "c"))


@given(
    key=texts,
    body=st.binary(max_size=300),
    message_id=texts,
    properties=st.dictionaries(texts, texts, max_size=3),
    numbers=st.tuples(st.integers(0, 1 << 60), st.integers(0, 1 << 30)),
)
def test_the_key_is_found_in_any_record(
    key: str, body: bytes, message_id: str, properties: dict[str, str], numbers: tuple[int, int]
) -> None:
    record = message_pb2.Record(
        body=body,
        message_id=message_id,
        properties=properties,
        born_ms=numbers[0],
        attempt=numbers[1],
        retry=message_pb2.Retry(group=message_id),
        timer_key=key,
    )
    entry = message_pb2.RecordBatch(records=[record]).SerializeToString()

    assert key_in(entry) == key


@given(st.binary(max_size=60))
def test_what_is_no_record_has_some_key_or_none(data: bytes) -> None:
    assert isinstance(key_in(b"\x0a" + bytes([len(data)]) + data), str)
