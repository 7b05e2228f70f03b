"""The power goes, or the process dies, at every single operation on the disk."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import DiskFailed, DiskFull
from duemq_server.storage.log import SegmentedLog
from tests.crash.faulty_disk import FaultyDisk, PowerCut

DIRECTORY = "/log"
SEGMENT_BYTES = 4096
# Body sizes of the entries of each group: alone, in groups, around a sector, over a
# segment's end, larger than a segment, larger than what is written to zeroed space.
GROUPS = [
    [10],
    [1, 500, 33],
    [480],
    [700, 700, 700],
    [3000, 1200],
    [9000],
    [40_000],
    [5, 5, 5],
    [2],
]
SEEDS = range(12)


def body(number: int, size: int) -> bytes:
    return Random(number).randbytes(size - 1) + b"!"


BODIES = [body(i, size) for i, size in enumerate(size for group in GROUPS for size in group)]


def open_log(disk: Disk) -> SegmentedLog:
    return SegmentedLog.open(DIRECTORY, disk, segment_bytes=SEGMENT_BYTES)


def recovered(log: SegmentedLog) -> list[bytes]:
    return [bytes(entry.body) for entry in log.recover()]


def write_groups(log: SegmentedLog, acknowledged: list[bytes]) -> None:
    """Commits the groups; `acknowledged` grows as they become durable."""
    bodies = iter(BODIES[len(acknowledged) :])
    for sizes in GROUPS:
        group = [next(bodies) for _ in sizes]
        for entry in group:
            log.append(1, [entry])
        while log.durable_position < log.end_position:
            log.write_pending()
        acknowledged += group


def drain(log: SegmentedLog) -> None:
    while log.write_pending():
        pass


def run(disk: Disk, acknowledged: list[bytes]) -> None:
    log = open_log(disk)
    assert recovered(log) == []
    write_groups(log, acknowledged)


def count_operations(script: Callable[[FaultyDisk], object]) -> int:
    disk = FaultyDisk()
    script(disk)
    return disk.operations


OPERATIONS = count_operations(lambda disk: run(disk, []))


def crashed(cut_at: int) -> tuple[FaultyDisk, list[bytes]]:
    disk = FaultyDisk(cut_at=cut_at)
    acknowledged: list[bytes] = []
    with pytest.raises(PowerCut):
        run(disk, acknowledged)
    return disk, acknowledged


def assert_sound(disk: FaultyDisk, acknowledged: list[bytes]) -> None:
    """What is there is a prefix of what was sent and holds all that was acknowledged."""
    log = open_log(disk)
    there = recovered(log)
    assert there == BODIES[: len(there)]
    assert len(there) >= len(acknowledged)
    assert log.durable_position == log.end_position
    log.append(1, [b"and on it goes"])
    assert log.write_pending() is not None
    log.close()
    assert recovered(open_log(disk)) == [*there, b"and on it goes"]


@pytest.mark.parametrize("cut_at", range(1, OPERATIONS + 1))
def test_a_power_cut_keeps_what_was_acknowledged(cut_at: int) -> None:
    disk, acknowledged = crashed(cut_at)
    assert_sound(disk.after_power_cut(None), acknowledged)
    for seed in SEEDS:
        assert_sound(disk.after_power_cut(Random(seed)), acknowledged)


@pytest.mark.parametrize("cut_at", range(1, OPERATIONS + 1))
def test_a_kill_keeps_what_was_acknowledged(cut_at: int) -> None:
    disk, acknowledged = crashed(cut_at)
    assert_sound(disk.after_kill(), acknowledged)


def run_overlapped(disk: Disk, acknowledged: list[bytes]) -> None:
    """As the two threads of a LogWriter: a group is written before the one ahead is synced."""
    log = open_log(disk)
    assert recovered(log) == []
    bodies = iter(BODIES)
    written = 0
    for number, sizes in enumerate(GROUPS, 1):
        for entry in [next(bodies) for _ in sizes]:
            log.append(1, [entry])
        while log.written_position < log.end_position:
            log.write_group()
        written += len(sizes)
        if number % 2 == 0:
            log.sync()
            acknowledged[:] = BODIES[:written]


OVERLAPPED_OPERATIONS = count_operations(lambda disk: run_overlapped(disk, []))


@pytest.mark.parametrize("cut_at", range(1, OVERLAPPED_OPERATIONS + 1))
def test_a_power_cut_may_take_two_groups_that_were_written_and_not_synced(cut_at: int) -> None:
    disk = FaultyDisk(cut_at=cut_at)
    acknowledged: list[bytes] = []
    with pytest.raises(PowerCut):
        run_overlapped(disk, acknowledged)
    for keep in (None, *map(Random, SEEDS)):
        assert_sound(disk.after_power_cut(keep), acknowledged)


@pytest.mark.parametrize("cut_at", range(2, OPERATIONS + 1, 5))
def test_a_power_cut_during_recovery_does_no_harm(cut_at: int) -> None:
    disk, acknowledged = crashed(cut_at)
    for seed in SEEDS:
        operations = count_operations_of_recovery(disk, seed)
        for second_cut in range(1, operations + 1):
            again = disk.after_power_cut(Random(seed))
            again.cut_at = second_cut
            with pytest.raises(PowerCut):
                recovered(open_log(again))
            assert_sound(again.after_power_cut(Random(seed + 1)), acknowledged)


def count_operations_of_recovery(disk: FaultyDisk, seed: int) -> int:
    again = disk.after_power_cut(Random(seed))
    recovered(open_log(again))
    return again.operations


def test_short_writes_are_continued() -> None:
    disk = FaultyDisk(write_bytes_max=100)
    acknowledged: list[bytes] = []
    run(disk, acknowledged)
    assert acknowledged == BODIES
    assert_sound(disk.after_power_cut(None), acknowledged)


@pytest.mark.parametrize("capacity_bytes", [100, 2000, 5000, 5100, 9000, 20_000, 56_000])
def test_a_full_disk_holds_writes_until_space_is_back(capacity_bytes: int) -> None:
    disk = FaultyDisk(capacity_bytes=capacity_bytes)
    log = open_log(disk)
    assert recovered(log) == []
    for entry in BODIES:
        log.append(1, [entry])
    with pytest.raises(DiskFull):
        drain(log)
    with pytest.raises(DiskFull, match="no space left"):
        log.append(1, [b"refused"])
    before = log.durable_position
    there = recovered(open_log(disk.after_kill()))
    assert there == BODIES[: len(there)]

    disk.capacity_bytes = None
    drain(log)
    assert log.durable_position == log.end_position > before
    log.append(1, [b"accepted"])
    log.write_pending()
    assert recovered(open_log(disk.after_power_cut(None))) == [*BODIES, b"accepted"]


@pytest.mark.parametrize("fail_sync_at", range(2, 14))
def test_a_failed_sync_stops_the_log(fail_sync_at: int) -> None:
    disk = FaultyDisk(fail_sync_at=fail_sync_at)
    acknowledged: list[bytes] = []
    log = open_log(disk)
    assert recovered(log) == []
    with pytest.raises(DiskFailed):
        write_groups(log, acknowledged)
    with pytest.raises(DiskFailed):
        log.append(1, [b"refused"])
    for seed in SEEDS:
        assert_sound(disk.after_power_cut(Random(seed)), acknowledged)


@pytest.mark.parametrize("fail_sync_at", range(2, 14))
def test_what_a_failed_sync_left_in_memory_is_durable_before_a_start_counts_on_it(
    fail_sync_at: int,
) -> None:
    disk = FaultyDisk(fail_sync_at=fail_sync_at)
    acknowledged: list[bytes] = []
    with pytest.raises(DiskFailed):
        run(disk, acknowledged)
    disk = disk.after_kill()
    log = open_log(disk)
    there = recovered(log)
    assert len(there) >= len(acknowledged)
    for entry in (b"more", b"and more"):
        log.append(1, [entry])
        log.write_pending()
    for keep in (None, *map(Random, SEEDS)):
        again = recovered(open_log(disk.after_power_cut(keep)))
        assert again == [*there, b"more", b"and more"]
