"""Torn tails are cut and kept aside; damage refuses to start."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress

import pytest

from duemq_server.storage.disk import DiskFile
from duemq_server.storage.errors import CorruptFile, CorruptLog, DiskFull
from duemq_server.storage.log import SegmentedLog
from tests.crash.faulty_disk import FaultyDisk, PowerCut

DIRECTORY = "/log"
SEGMENT_BYTES = 2000
FIRST = f"{DIRECTORY}/{0:020d}"
MARK = f"{DIRECTORY}/durable"
ENTRY_BYTES = 136
BODIES = [f"{i:04d}".encode() * 25 for i in range(10)]


def opened(disk: FaultyDisk) -> SegmentedLog:
    return SegmentedLog.open(DIRECTORY, disk, segment_bytes=SEGMENT_BYTES)


def recovered(disk: FaultyDisk) -> list[bytes]:
    return [bytes(entry.body) for entry in opened(disk).recover()]


def written(*groups: int) -> FaultyDisk:
    """A disk with BODIES committed in groups of the given sizes."""
    disk = FaultyDisk()
    log = opened(disk)
    assert list(log.recover()) == []
    bodies = iter(BODIES)
    for size in groups:
        for _ in range(size):
            log.append(1, [next(bodies)])
        log.write_pending()
    log.close()
    return disk


def forget_mark(disk: FaultyDisk) -> None:
    """As a power failure may: the mark is not synced."""
    disk.overwrite(MARK, 0, bytes(16))


def test_a_mark_on_a_bad_sector_is_named_with_what_helps() -> None:
    """What a start would write there is not better off."""
    disk = written(1, 1)
    disk.wear_out(MARK, 0)
    with pytest.raises(CorruptFile, match=f"{MARK}, offset 0: Input/output.* Remove this file"):
        recovered(disk)
    disk.unlink(MARK)
    assert recovered(disk) == BODIES[:2]
    assert disk.exists(MARK)


def test_a_mark_that_may_not_be_opened_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it a lost end of the log would not be noticed."""
    disk = written(1, 1)
    opens = disk.open

    def refuse(path: str, **how: bool) -> DiskFile:
        if path == MARK:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opens(path, **how)

    monkeypatch.setattr(disk, "open", refuse)
    with pytest.raises(PermissionError):
        recovered(disk)


def test_garbage_after_the_end_is_cut_and_kept_aside(caplog: pytest.LogCaptureFixture) -> None:
    disk = written(1, 1, 1)
    end = 3 * ENTRY_BYTES
    disk.overwrite(FIRST, end, b"garbage")
    assert recovered(disk) == BODIES[:3]
    assert disk.content(f"{FIRST}.broken-{end}") == b"garbage"
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert f"cut at position {end}" in caplog.text
    caplog.clear()
    assert recovered(disk) == BODIES[:3]
    assert caplog.records == []


def test_space_taken_ahead_is_no_torn_tail(caplog: pytest.LogCaptureFixture) -> None:
    disk = written(1, 1, 1)
    assert len(disk.content(FIRST)) > 3 * ENTRY_BYTES
    assert recovered(disk) == BODIES[:3]
    assert caplog.records == []
    assert disk.listdir(DIRECTORY) == [f"{0:020d}", "durable"]


def test_a_cut_survives_a_power_failure() -> None:
    disk = written(1, 1)
    disk.overwrite(FIRST, 2 * ENTRY_BYTES, b"garbage")
    assert recovered(disk) == BODIES[:2]
    disk = disk.after_power_cut(None)
    assert len(disk.content(FIRST)) == 2 * ENTRY_BYTES
    assert disk.content(f"{FIRST}.broken-{2 * ENTRY_BYTES}") == b"garbage"


@pytest.mark.parametrize("cut_at", range(1, 10))
def test_a_tail_is_never_gone_before_its_copy_is_there(cut_at: int) -> None:
    disk = written(1, 1)
    disk.overwrite(FIRST, 2 * ENTRY_BYTES, b"garbage")
    disk = disk.after_power_cut(None)
    disk.cut_at = cut_at
    with suppress(PowerCut):
        recovered(disk)
    disk = disk.after_power_cut(None)
    copies = [path for path in disk.paths if ".broken-" in path]
    assert b"garbage" in disk.content(FIRST) or disk.content(copies[0]) == b"garbage"


@pytest.mark.parametrize("cut_at", range(1, 13))
def test_an_interrupted_cut_leaves_one_copy(cut_at: int) -> None:
    disk = written(1, 1)
    disk.overwrite(FIRST, 2 * ENTRY_BYTES, b"garbage")
    disk = disk.after_power_cut(None)
    disk.cut_at = cut_at
    with suppress(PowerCut):
        recovered(disk)
    disk = disk.after_power_cut(None)
    recovered(disk)
    copies = [path for path in disk.paths if ".broken-" in path]
    assert [disk.content(path) for path in copies] == [b"garbage"]


def unfit(disk: FaultyDisk, end: int, room: int) -> FaultyDisk:
    """The disk, whose log has nothing in advance behind `end`, with so many bytes left."""
    disk.chop(FIRST, end)
    disk.capacity_bytes = disk.used_bytes() + room
    return disk


def test_space_taken_in_advance_is_room_for_what_is_kept_aside() -> None:
    disk = written(1, 1)
    disk.overwrite(FIRST, 2 * ENTRY_BYTES, b"garbage")
    disk.capacity_bytes = disk.used_bytes()
    assert recovered(disk) == BODIES[:2]
    assert disk.content(f"{FIRST}.broken-{2 * ENTRY_BYTES}") == b"garbage"


def test_a_torn_write_that_finds_no_space_for_a_copy_holds_no_start_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = written(1, 1)
    disk.overwrite(FIRST, 2 * ENTRY_BYTES, b"garbage")
    paths = disk.paths
    assert recovered(unfit(disk, 2 * ENTRY_BYTES + 7, 3)) == BODIES[:2]
    assert disk.paths == paths
    assert len(disk.content(FIRST)) == 2 * ENTRY_BYTES
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert "7 bytes of a torn write are gone, without a copy" in caplog.text
    assert "no space left" in caplog.text


def test_what_was_durable_is_not_cut_without_a_copy() -> None:
    disk = written(1, 1, 1)
    disk.overwrite(FIRST, 2 * ENTRY_BYTES, b"garbage")
    paths = disk.paths
    unfit(disk, 3 * ENTRY_BYTES, 3)
    for _ in range(2):
        with pytest.raises(DiskFull):
            recovered(disk)
        assert disk.paths == paths
    disk.capacity_bytes = None
    log = opened(disk)
    assert [bytes(entry.body) for entry in log.recover()] == BODIES[:2]
    assert log.was_durable_to == 3 * ENTRY_BYTES
    assert disk.content(f"{FIRST}.broken-{2 * ENTRY_BYTES}").startswith(b"garbage")


def test_valid_entries_are_not_cut_without_a_copy() -> None:
    """Behind a hole, all written before it was durable: acknowledged, perhaps, where the interval
    of syncs is set.  They end with zeros, which are no space in advance."""
    disk = written(1, 3)
    forget_mark(disk)
    disk.overwrite(FIRST, 2 * ENTRY_BYTES, b"garbage")
    rest = disk.content(FIRST)[2 * ENTRY_BYTES : 4 * ENTRY_BYTES]
    assert rest.endswith(b"\0")
    unfit(disk, 4 * ENTRY_BYTES + 20, 3)
    for _ in range(2):
        with pytest.raises(DiskFull):
            recovered(disk)
    disk.capacity_bytes = None
    assert recovered(disk) == BODIES[:2]
    assert disk.content(f"{FIRST}.broken-{2 * ENTRY_BYTES}") == rest


def test_what_an_earlier_cut_kept_stays() -> None:
    disk = written(1, 1)
    for garbage in (b"garbage", b"rubbish", b"garbage", b"waste"):
        disk.overwrite(FIRST, 2 * ENTRY_BYTES, garbage)
        assert recovered(disk) == BODIES[:2]
    aside = f"{FIRST}.broken-{2 * ENTRY_BYTES}"
    kept = {path: disk.content(path) for path in disk.paths if ".broken-" in path}
    assert kept == {aside: b"garbage", f"{aside}.2": b"rubbish", f"{aside}.3": b"waste"}


def test_what_was_lost_is_known_until_something_new_is_durable() -> None:
    disk = written(1, 1, 1)
    disk.chop(FIRST, 2 * ENTRY_BYTES)
    for _ in range(2):
        log = opened(disk)
        assert len(list(log.recover())) == 2
        assert (log.end_position, log.was_durable_to) == (2 * ENTRY_BYTES, 3 * ENTRY_BYTES)
    log.append(1, [b"new"])
    log.write_pending()
    again = opened(disk)
    assert len(list(again.recover())) == 3
    assert again.was_durable_to == again.end_position


def test_the_loss_of_acknowledged_data_at_the_end_is_an_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = written(1, 1, 1)
    disk.chop(FIRST, 3 * ENTRY_BYTES - 20)
    assert recovered(disk) == BODIES[:2]
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert f"LOST: it had been durable up to {3 * ENTRY_BYTES}" in caplog.text


@pytest.mark.parametrize("mark_is_there", [True, False])
def test_damage_before_later_groups_refuses_to_start(mark_is_there: bool) -> None:
    disk = written(1, 1, 1)
    disk.flip(FIRST, ENTRY_BYTES + 50)
    if not mark_is_there:
        forget_mark(disk)
    with pytest.raises(CorruptLog, match=f"valid entries follow at {2 * ENTRY_BYTES}") as caught:
        recovered(disk)
    assert (caught.value.path, caught.value.offset) == (FIRST, ENTRY_BYTES)
    assert f"--at {ENTRY_BYTES}" in str(caught.value)


def test_damage_inside_the_last_group_refuses_to_start_when_it_was_durable() -> None:
    disk = written(1, 3)
    disk.flip(FIRST, 2 * ENTRY_BYTES + 50)
    with pytest.raises(CorruptLog):
        recovered(disk)


def test_a_hole_in_a_group_that_was_never_synced_is_cut() -> None:
    disk = written(1, 3)
    disk.flip(FIRST, 2 * ENTRY_BYTES + 50)
    forget_mark(disk)
    assert recovered(disk) == BODIES[:2]
    kept = disk.content(f"{FIRST}.broken-{2 * ENTRY_BYTES}")
    assert len(kept) == 2 * ENTRY_BYTES  # with the padding of the last entry, which is valid


def test_what_a_checkpoint_has_seen_was_durable() -> None:
    disk = written(1, 3)
    disk.flip(FIRST, 2 * ENTRY_BYTES + 50)
    forget_mark(disk)
    with pytest.raises(CorruptLog):
        list(opened(disk).recover(4 * ENTRY_BYTES))


def test_damage_in_a_closed_segment_refuses_to_start() -> None:
    disk = written(10)
    log = opened(disk)
    list(log.recover())
    for body in BODIES:
        log.append(1, [body])
    while log.write_pending():
        pass
    assert len(log.segments) == 2
    disk.flip(FIRST, 13 * ENTRY_BYTES + 100)  # its last entry: none valid follows in the file
    forget_mark(disk)
    with pytest.raises(CorruptLog) as caught:
        recovered(disk)
    assert caught.value.offset == 13 * ENTRY_BYTES


def test_a_missing_segment_in_the_middle_refuses_to_start() -> None:
    disk = FaultyDisk()
    log = SegmentedLog.open(DIRECTORY, disk, segment_bytes=300)
    list(log.recover())
    for body in BODIES:
        log.append(1, [body])
    while log.write_pending():
        pass
    disk.unlink(log.segments[2].path)
    with pytest.raises(CorruptLog, match="end of file"):
        recovered(disk)


def test_missing_segments_are_not_taken_for_a_new_log() -> None:
    disk = written(3)
    disk.unlink(FIRST)
    with pytest.raises(CorruptLog, match="no segment is here, but 408 bytes were durable"):
        recovered(disk)


def test_a_log_that_ends_before_the_checkpoint_says_so_by_its_end() -> None:
    disk = written(1, 1, 1)
    disk.chop(FIRST, 2 * ENTRY_BYTES - 5)
    log = opened(disk)
    assert list(log.recover(3 * ENTRY_BYTES)) == []
    assert log.end_position == ENTRY_BYTES
    assert [bytes(e.body) for e in log.recover()] == BODIES[:1]


def test_what_a_killed_process_had_only_written_is_synced_before_it_counts() -> None:
    disk = FaultyDisk()
    log = opened(disk)
    list(log.recover())
    log.append(1, [BODIES[0]])
    log.write_group()
    disk = disk.after_kill()
    log = opened(disk)
    assert [bytes(e.body) for e in log.recover()] == BODIES[:1]
    assert log.durable_position == ENTRY_BYTES
    assert recovered(disk.after_power_cut(None)) == BODIES[:1]


@pytest.mark.parametrize("position", [0, 1, 3, 10])
def test_entries_larger_than_a_read_are_recovered(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duemq_server.storage.recovery.CHUNK_BYTES", 64)
    disk = written(4, 6)
    entries = list(opened(disk).recover(position * ENTRY_BYTES))
    assert [bytes(e.body) for e in entries] == BODIES[position:]
    disk.overwrite(FIRST, 10 * ENTRY_BYTES, bytes(100) + b"garbage")
    assert recovered(disk) == BODIES
