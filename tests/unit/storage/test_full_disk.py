"""What a log does with the last bytes of a disk."""

from __future__ import annotations

import pytest

from duemq_server.storage import checkpoint
from duemq_server.storage.errors import DiskFull
from duemq_server.storage.segment import (
    ALLOCATE_AHEAD_BYTES,
    SMALL_WRITE_BYTES,
    ZERO_AHEAD_BYTES,
    Segment,
    SegmentWriter,
)
from tests.crash.faulty_disk import FaultyDisk

KIB = 1024
SMALL, LARGE = 6_000, 20_000
assert SMALL < SMALL_WRITE_BYTES < LARGE
KINDS = [(SMALL, ZERO_AHEAD_BYTES), (LARGE, ALLOCATE_AHEAD_BYTES)]
PATH = "/log/0"


def writing(disk: FaultyDisk) -> SegmentWriter:
    disk.makedirs("/log")
    return SegmentWriter(Segment(0, PATH), disk, 64 * KIB * KIB)


def write(writer: SegmentWriter, size: int, position: int) -> int:
    writer.write([b"a" * size], size, position)
    writer.sync()
    return position + size


@pytest.mark.parametrize(("size", "ahead"), KINDS)
def test_space_in_advance_is_left_where_there_is_too_little(size: int, ahead: int) -> None:
    disk = FaultyDisk(capacity_bytes=ahead - KIB)
    writer = writing(disk)
    write(writer, size, 0)
    assert disk.content(PATH) == b"a" * size
    checkpoint.save("/log/checkpoint", bytes(100 * KIB), disk)


@pytest.mark.parametrize(("size", "ahead"), KINDS)
def test_what_does_not_fit_takes_no_space(size: int, ahead: int) -> None:
    disk = FaultyDisk()
    writer = writing(disk)
    write(writer, size, 0)
    taken = len(disk.content(PATH))
    assert taken >= ahead
    disk.capacity_bytes = taken + size // 2
    for _ in range(2):
        with pytest.raises(DiskFull):
            write(writer, size, taken)
        assert disk.free_bytes("/log") == size // 2
    disk.capacity_bytes = None
    assert write(writer, size, taken) <= len(disk.content(PATH))


@pytest.mark.parametrize(("size", "ahead"), KINDS)
def test_a_full_disk_is_not_asked_for_more_with_each_group(
    size: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk(capacity_bytes=ahead - KIB)
    writer = writing(disk)
    end = write(writer, size, 0)

    def nothing_is_left() -> None:
        assert disk.free_bytes("/log"), "a group took all that there was"

    step = FaultyDisk.step
    monkeypatch.setattr(FaultyDisk, "step", lambda self: (step(self), nothing_is_left()))
    for _ in range(10):
        end = write(writer, size, end)
    assert disk.content(PATH) == b"a" * end


@pytest.mark.parametrize(("size", "ahead"), KINDS)
def test_space_is_taken_in_advance_again_some_way_on(size: int, ahead: int) -> None:
    disk = FaultyDisk(capacity_bytes=ahead - KIB)
    writer = writing(disk)
    write(writer, size, 0)
    disk.capacity_bytes = None
    end = write(writer, size, ahead - size)
    assert len(disk.content(PATH)) == end
    end = write(writer, size, ahead + size)
    assert len(disk.content(PATH)) > end


def test_a_log_that_was_cut_takes_space_in_advance() -> None:
    disk = FaultyDisk(capacity_bytes=ZERO_AHEAD_BYTES - KIB)
    writer = writing(disk)
    write(writer, SMALL, 0)
    disk.capacity_bytes = None
    writer.cut(0)
    write(writer, SMALL, 0)
    assert len(disk.content(PATH)) == ZERO_AHEAD_BYTES
