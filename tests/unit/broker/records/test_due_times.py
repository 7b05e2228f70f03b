import struct

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol.due import DEFAULT_LEVELS, DUE_MS_MAX, parse_levels
from duemq_server.broker.records.due_times import is_timed, resolve
from tests.unit.broker.batches import FakeBatch

NOW_MS = 1_000_000
LEVELS = parse_levels(DEFAULT_LEVELS)


def i64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def due(count: int = 2, **fields: bytes) -> list[int]:
    return resolve(FakeBatch(**fields), count, NOW_MS, LEVELS).tolist()


def test_delays_count_from_the_brokers_clock() -> None:
    assert due(delays_ms=i64(0, 5)) == [NOW_MS, NOW_MS + 5]


def test_one_entry_is_for_all_records() -> None:
    assert due(3, delays_ms=i64(7)) == [NOW_MS + 7] * 3
    assert due(3, due_ms=i64(9)) == [9] * 3
    assert due(3, delay_levels=u32(2)) == [NOW_MS + 5_000] * 3


def test_absolute_times_may_be_past() -> None:
    assert due(due_ms=i64(0, DUE_MS_MAX)) == [0, DUE_MS_MAX]


def test_levels_count_from_one() -> None:
    assert due(delay_levels=u32(1, 18)) == [NOW_MS + 1_000, NOW_MS + 7_200_000]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"delays_ms": i64(-1)}, "delays_ms"),
        ({"delays_ms": i64(1, DUE_MS_MAX)}, "delays_ms"),
        ({"due_ms": i64(-1)}, "due_ms"),
        ({"due_ms": i64(DUE_MS_MAX + 1)}, "due_ms"),
        ({"delay_levels": u32(0)}, "delay_levels"),
        ({"delay_levels": u32(1, 19)}, "delay_levels"),
        ({"delays_ms": i64(1, 2, 3)}, "delays_ms"),
        ({"due_ms": b"\0" * 7}, "due_ms"),
        ({"due_ms": i64(1), "delays_ms": i64(1)}, "due_ms"),
    ],
)
def test_what_is_illegal_is_refused_and_never_clamped(fields: dict[str, bytes], name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        due(**fields)
    assert caught.value.field == name
    assert caught.value.limit


def test_timed_is_what_has_any_of_the_three() -> None:
    assert not is_timed(FakeBatch())
    assert is_timed(FakeBatch(delay_levels=u32(1)))
