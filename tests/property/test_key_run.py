"""A key run says what a walk over all records says; damaged, it says so or says the same."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq_server.storage.errors import CorruptFile, UnknownVersion
from duemq_server.storage.indexes import key_run
from duemq_server.storage.indexes.key_run import KeyRun
from tests.crash.faulty_disk import FaultyDisk

PATH = "/run"
SPAN = 4_096
BASE = 5 * SPAN


def hashes(seed: int, count: int, distinct: int) -> list[int]:
    """Key hashes of records: 0 without a key, the largest one among the others."""
    random = Random(seed)
    choice = [0, 0xFFFFFFFF, *(random.getrandbits(32) for _ in range(distinct))]
    return [random.choice(choice) for _ in range(count)]


def written(stored: list[int], first: int = 0, piece: int = 1_000) -> FaultyDisk:
    disk = FaultyDisk()
    column = np.array(stored, np.uint32)
    pieces = [
        key_run.entries_of(column[at : at + piece], first + at)
        for at in range(0, len(column), piece)
    ]
    key_run.write(PATH, key_run.encode(BASE, SPAN, pieces), disk)
    return disk


def find(disk: FaultyDisk, key_hash: int, low: int, high: int, limit: int = SPAN) -> list[int]:
    return KeyRun(disk.open(PATH), PATH).find(key_hash, low, high, limit)


worlds = st.builds(
    hashes, st.integers(0, 1 << 30), st.integers(0, SPAN), st.sampled_from([0, 1, 3, 5_000])
)


@given(worlds, st.integers(0, SPAN), st.integers(0, SPAN), st.integers(1, 3_000), st.randoms())
def test_it_finds_what_a_walk_finds(
    stored: list[int], low: int, high: int, limit: int, random: Random
) -> None:
    disk = written(stored)
    wanted = random.choice([*stored, 0xFFFFFFFF, 1]) or 1
    walked = [n for n, each in enumerate(stored) if each == wanted and low <= n < high]
    found = find(disk, wanted, BASE + low, BASE + high, limit)
    assert found == [BASE + n for n in walked[:limit]]


@given(worlds, st.data())
def test_a_flipped_bit_is_noticed_or_does_no_harm(stored: list[int], data: st.DataObject) -> None:
    disk = written(stored)
    size = len(disk.content(PATH))
    disk.flip(PATH, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
    wanted = next(filter(None, stored), 1)
    try:
        found = find(disk, wanted, BASE, BASE + SPAN)
    except (CorruptFile, UnknownVersion):
        return
    assert found == [BASE + n for n, each in enumerate(stored) if each == wanted]


@given(worlds, st.data())
def test_a_torn_file_is_noticed_or_does_no_harm(stored: list[int], data: st.DataObject) -> None:
    disk = written(stored)
    disk.chop(PATH, data.draw(st.integers(0, len(disk.content(PATH)))))
    wanted = next(filter(None, stored), 1)
    try:
        found = find(disk, wanted, BASE, BASE + SPAN)
    except CorruptFile:
        return
    assert found == [BASE + n for n, each in enumerate(stored) if each == wanted]


def test_all_records_with_one_key() -> None:
    disk = written([7] * SPAN)
    everywhere = list(range(BASE, BASE + SPAN))
    assert find(disk, 7, BASE, BASE + SPAN) == everywhere
    assert find(disk, 7, BASE + 2_000, BASE + 3_000, 10) == everywhere[2_000:2_010]
    assert find(disk, 6, BASE, BASE + SPAN) == find(disk, 8, BASE, BASE + SPAN) == []


def test_a_span_whose_beginning_is_gone() -> None:
    disk = written([7] * 10, first=SPAN - 10)
    assert find(disk, 7, BASE, BASE + SPAN) == list(range(BASE + SPAN - 10, BASE + SPAN))


def test_without_keys_it_is_a_header() -> None:
    disk = written([0] * SPAN)
    assert len(disk.content(PATH)) == key_run.HEADER.size
    assert find(disk, 1, BASE, BASE + SPAN) == []


def test_the_largest_span_is_written_and_read() -> None:
    run = KeyRun(written([]).open(PATH), PATH)
    run.check_span(BASE, SPAN)
    disk = FaultyDisk()
    column = np.arange(1, key_run.SPAN_MAX + 1, dtype=np.uint32)
    pieces = [key_run.entries_of(column, 0)]
    key_run.write(PATH, key_run.encode(0, key_run.SPAN_MAX, pieces), disk)
    assert find(disk, key_run.SPAN_MAX, 0, key_run.SPAN_MAX) == [key_run.SPAN_MAX - 1]
    assert len(KeyRun(disk.open(PATH), PATH).entries()) == key_run.SPAN_MAX
    with pytest.raises(ValueError, match="span"):
        key_run.encode(0, key_run.SPAN_MAX + 1, [])


def test_a_run_of_another_span_is_none_of_this_one() -> None:
    run = KeyRun(written([1]).open(PATH), PATH)
    for base, span in ((0, SPAN), (BASE, SPAN // 2)):
        with pytest.raises(CorruptFile, match=f"{SPAN} records from {BASE} on"):
            run.check_span(base, span)


def test_a_newer_version_is_said_to_be_one() -> None:
    disk = written([1])
    disk.overwrite(PATH, 8, b"\x02")
    with pytest.raises(UnknownVersion, match="version 2"):
        KeyRun(disk.open(PATH), PATH)


def test_names() -> None:
    assert key_run.name_of(262_144) == "00000000000000262144.keys"
    assert key_run.base_of("00000000000000262144.keys") == 262_144
    for name in ("00000000000000262144", "262144.keys", "0000000000000026214x.keys", ".keys"):
        assert key_run.base_of(name) is None
