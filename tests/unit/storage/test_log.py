from __future__ import annotations

import pytest

from duemq_server.storage import recovery
from duemq_server.storage.errors import CorruptLog, DiskFailed, LogFull
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.log_parts import log_opening, log_reader
from duemq_server.storage.record import ENTRY_BYTES_MAX, entry_bytes
from tests.crash.faulty_disk import FaultyDisk, FaultyFile

DIRECTORY = "/data/log"


def opened(disk: FaultyDisk, **settings: int) -> SegmentedLog:
    settings.setdefault("segment_bytes", 1000)
    log = SegmentedLog.open(DIRECTORY, disk, **settings)  # type: ignore[arg-type]
    assert list(log.recover()) == []
    return log


def committed(log: SegmentedLog, *bodies: bytes) -> list[int]:
    positions = [log.append(1, [body])[0] for body in bodies]
    while log.write_pending():
        pass
    return positions


def bodies(log: SegmentedLog, first: int = 0) -> list[bytes]:
    return [bytes(entry.body) for entry in log.entries(first)]


def numbered(count: int, size: int = 100) -> list[bytes]:
    return [str(i).encode().rjust(size, b".") for i in range(count)]


def test_positions_follow_each_other_without_gaps() -> None:
    log = opened(FaultyDisk())
    assert log.append(1, [b"a" * 10, b"b"]) == (0, entry_bytes(11))
    assert log.append(2, []) == (entry_bytes(11), entry_bytes(11) + 32)
    assert (log.end_position, log.written_position, log.durable_position) == (80, 0, 0)
    group = log.write_pending()
    assert group is not None
    assert (group.entries, group.size_bytes, group.end_position) == (2, 80, 80)
    assert (log.written_position, log.durable_position, log.pending_bytes) == (80, 80, 0)


def test_nothing_is_written_when_nothing_waits() -> None:
    disk = FaultyDisk()
    log = opened(disk)
    before = disk.operations
    assert log.write_pending() is None
    assert disk.operations == before


def test_what_is_not_written_cannot_be_read() -> None:
    log = opened(FaultyDisk())
    log.append(1, [b"a"])
    with pytest.raises(IndexError, match="position 0 is not in the log: it holds 0 to 0"):
        log.read_entry(0)


def test_written_is_not_durable_before_a_sync() -> None:
    disk = FaultyDisk()
    log = opened(disk)
    log.append(1, [b"a"])
    log.write_group()
    assert (log.written_position, log.durable_position) == (40, 0)
    assert bodies(log) == [b"a"]
    assert log.sync() == 40
    assert log.durable_position == 40


def test_an_append_needs_a_recovered_log() -> None:
    log = SegmentedLog.open(DIRECTORY, FaultyDisk())
    with pytest.raises(RuntimeError, match="recover"):
        log.append(1, [b"a"])


def test_the_log_rolls_into_segments_named_by_their_position() -> None:
    disk = FaultyDisk()
    log = opened(disk)
    committed(log, *numbered(20))
    assert [s.start for s in log.segments] == [0, 952, 1904]
    assert disk.listdir(DIRECTORY) == ["0" * 20, f"{952:020d}", f"{1904:020d}", "durable"]
    assert len(disk.content(f"{DIRECTORY}/{0:020d}")) == 952
    assert bodies(log) == numbered(20)


def test_an_entry_larger_than_a_segment_gets_one_of_its_own() -> None:
    log = opened(FaultyDisk())
    sent = [b"small", b"L" * 5000, b"tail"]
    positions = committed(log, *sent)
    assert [s.start for s in log.segments] == [positions[0], positions[1], positions[2]]
    assert bodies(log) == sent


def test_an_entry_beyond_the_limit_is_refused() -> None:
    log = opened(FaultyDisk())
    with pytest.raises(ValueError, match=f"exceeds {ENTRY_BYTES_MAX}"):
        log.append(1, [bytes(ENTRY_BYTES_MAX)])
    assert log.end_position == 0


def test_too_much_waiting_is_refused_and_accepted_again_after_a_write() -> None:
    log = opened(FaultyDisk(), pending_bytes_max=300)
    log.append(1, [bytes(1000)])  # one entry is always accepted
    with pytest.raises(LogFull, match="1032 bytes wait for the disk, at most 300 may"):
        log.append(1, [b"a"])
    log.write_pending()
    log.append(1, [b"a"])


def test_groups_are_bounded() -> None:
    log = opened(FaultyDisk(), segment_bytes=10_000, group_bytes_max=300)
    for body in numbered(5):
        log.append(1, [body])
    groups = []
    while group := log.write_pending():
        groups.append(group.entries)
    assert groups == [2, 2, 1]


@pytest.mark.parametrize("read_ahead_bytes", [32, 64, 10_000])
def test_an_entry_is_read_by_its_position(
    monkeypatch: pytest.MonkeyPatch, read_ahead_bytes: int
) -> None:
    monkeypatch.setattr(log_reader, "_READ_AHEAD_BYTES", read_ahead_bytes)
    log = opened(FaultyDisk())
    positions = committed(log, *numbered(5))
    assert log.read_entry(positions[3]).body == numbered(5)[3]
    assert log.read_entry(positions[4]).end == log.end_position
    assert bytes(log.read(positions[1] + 32, 100)) == numbered(5)[1]
    with pytest.raises(CorruptLog, match="magic"):
        log.read_entry(positions[1] + 8)


def test_a_reader_starts_at_any_entry_and_stops_where_told() -> None:
    log = opened(FaultyDisk())
    positions = committed(log, *numbered(20))
    assert bodies(log, positions[11]) == numbered(20)[11:]
    some = list(log.entries(positions[2], positions[9]))
    assert [bytes(entry.body) for entry in some] == numbered(20)[2:9]
    assert list(log.entries(log.end_position)) == []


@pytest.mark.parametrize("chunk_bytes", [64, 136, 300, 1 << 22])
def test_a_reader_reads_no_further_than_the_entry_where_it_stops(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(recovery, "CHUNK_BYTES", chunk_bytes)
    log = opened(FaultyDisk(), segment_bytes=100_000)
    positions = committed(log, *numbered(20))
    ends: list[int] = []
    pread = FaultyFile.pread

    def noted(file: FaultyFile, length: int, offset: int, nowait: bool = False) -> memoryview:
        ends.append(offset + length)
        return pread(file, length, offset, nowait)

    monkeypatch.setattr(FaultyFile, "pread", noted)
    for end in (positions[9], positions[9] - 8, positions[8] + 8):
        some = list(log.entries(positions[2], end))
        assert [bytes(entry.body) for entry in some] == numbered(20)[2:9]
    assert max(ends) == positions[9]


def test_cold_bytes_are_refused_to_a_reader_that_cannot_wait() -> None:
    log = opened(FaultyDisk(cold=True))
    committed(log, b"a")
    with pytest.raises(BlockingIOError):
        log.read_entry(0, nowait=True)
    assert log.read_entry(0).body == b"a"


def test_a_read_notices_damage_and_says_where_and_what_to_do() -> None:
    disk = FaultyDisk()
    log = opened(disk)
    positions = committed(log, *numbered(20))
    disk.flip(f"{DIRECTORY}/{952:020d}", 200)
    with pytest.raises(CorruptLog) as caught:
        log.read_entry(positions[8])
    error = caught.value
    assert (error.path, error.offset) == (f"{DIRECTORY}/{952:020d}", 136)
    assert "duemq-storage check" in str(error)
    assert f"duemq-storage cut {DIRECTORY} --at {positions[8]}" in str(error)
    with pytest.raises(CorruptLog):
        bodies(log)


def test_whole_old_segments_are_deleted_and_never_the_last() -> None:
    disk = FaultyDisk()
    log = opened(disk)
    positions = committed(log, *numbered(20))
    assert log.delete_before(1903) == 1
    assert log.start_position == 952
    with pytest.raises(IndexError, match="holds 952 to 2720"):
        log.read_entry(positions[0])
    assert bodies(log, 952) == numbered(20)[7:]
    assert log.delete_before(10**9) == 1
    assert [s.start for s in log.segments] == [1904]
    log.close()

    again = SegmentedLog.open(DIRECTORY, disk.after_power_cut(None), segment_bytes=1000)
    assert [bytes(e.body) for e in again.recover()] == numbered(20)[14:]
    assert again.start_position == 1904


def test_a_segment_that_somebody_took_away_is_damage() -> None:
    """Retention takes the oldest alone: a reader that took it for that would come back for ever."""
    disk = FaultyDisk()
    log = opened(disk)
    positions = committed(log, *numbered(20))
    log._files.close()
    for segment in log.segments[:2]:
        disk.unlink(segment.path)
    with pytest.raises(CorruptLog, match="the file is gone"):
        log.read_entry(positions[8])
    with pytest.raises(IndexError):
        log.read_entry(positions[0])


def test_a_segment_that_cannot_be_removed_stays_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk()
    log = opened(disk)
    committed(log, *numbered(20))

    def failing(path: str) -> None:
        raise DiskFailed(f"remove {path}: input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "unlink", failing)
        for _ in range(2):
            with pytest.raises(DiskFailed):
                log.delete_before(1904)
    assert log.start_position == 0
    assert bodies(log) == numbered(20)
    assert log.delete_before(1904) == 2
    again = SegmentedLog.open(DIRECTORY, disk, segment_bytes=1000)
    assert [bytes(e.body) for e in again.recover()] == numbered(20)[14:]


def test_a_recovery_yields_what_a_checkpoint_has_not_seen() -> None:
    disk = FaultyDisk()
    log = opened(disk)
    positions = committed(log, *numbered(20))
    for seen in (0, 3, 7, 12, 19):
        again = SegmentedLog.open(DIRECTORY, disk.after_kill(), segment_bytes=1000)
        entries = list(again.recover(positions[seen]))
        assert [bytes(e.body) for e in entries] == numbered(20)[seen:]
        assert again.end_position == log.end_position
    again = SegmentedLog.open(DIRECTORY, disk.after_kill(), segment_bytes=1000)
    assert list(again.recover(log.end_position)) == []
    assert again.end_position == log.end_position


def test_a_recovery_verifies_a_bounded_stretch_before_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_opening, "VERIFY_BACK_BYTES", 1000)
    monkeypatch.setattr(log_opening, "_BOUNDARY_BYTES", 200)
    disk = FaultyDisk()
    log = opened(disk, segment_bytes=100_000)
    committed(log, *numbered(100))
    end = log.end_position
    start_at = log.recovery_start(end)
    assert end - 1000 - 400 < start_at <= end - 1000

    def reopened(damaged_at: int) -> SegmentedLog:
        copy = disk.after_kill().after_power_cut(None)
        copy.flip(f"{DIRECTORY}/{0:020d}", damaged_at)
        return SegmentedLog.open(DIRECTORY, copy, segment_bytes=100_000, start_at=start_at)

    with pytest.raises(CorruptLog):
        list(reopened(start_at + 40).recover(end))
    assert list(reopened(start_at - 40).recover(end)) == []  # for `check`, or the reader


def test_where_to_verify_from_is_an_entry_of_the_log() -> None:
    log = opened(FaultyDisk())
    assert log.recovery_start(0) == 0
    positions = committed(log, *numbered(20))
    assert log.recovery_start(log.end_position) in positions


def test_bytes_that_look_like_an_entry_inside_a_body_are_only_bytes() -> None:
    disk = FaultyDisk()
    log = opened(disk, segment_bytes=10_000)
    committed(log, b"x" * 8)
    stored = disk.content(f"{DIRECTORY}/{0:020d}")[:40]
    position, end = log.append(1, [stored * 10])
    log.write_pending()
    disk.chop(f"{DIRECTORY}/{0:020d}", end - 8)  # torn: only the copies inside are whole
    disk.overwrite(f"{DIRECTORY}/durable", 0, bytes(16))
    again = SegmentedLog.open(DIRECTORY, disk, segment_bytes=10_000)
    assert [bytes(e.body) for e in again.recover()] == [b"x" * 8]
    assert again.end_position == position
