from __future__ import annotations

from typing import Any

import pytest

from duemq_server.replication.protocol.messages import CHUNK_BYTES_MAX, UNANSWERED_BYTES_MAX
from duemq_server.storage import record, recovery
from duemq_server.storage.errors import CorruptLog, DiskFailed, DiskFull, LogFull
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.record import InvalidEntryError
from duemq_server.storage.replicas import catching_up, epoch, replica_log
from duemq_server.storage.replicas.replica_log import ReplicaLog
from duemq_server.storage.tools.check import check_log
from duemq_server.storage.tools.dump import describe
from duemq_server.storage.writer import LogWriter
from tests.crash.faulty_disk import FaultyDisk

DIRECTORY = "/data/log"
FLAG = f"{DIRECTORY}/{catching_up.FILE_NAME}"


def opened(disk: FaultyDisk, **settings: int) -> ReplicaLog:
    settings.setdefault("segment_bytes", 1000)
    log = ReplicaLog.open(DIRECTORY, disk, **settings)
    list(log.recover())
    return log


def commit(log: SegmentedLog) -> None:
    while log.write_pending():
        pass


def leading(count: int = 8, size: int = 100) -> ReplicaLog:
    """A log whose entries are written one by one, each committed when it is durable."""
    log = opened(FaultyDisk())
    for number in range(count):
        log.append(1, [str(number).encode().rjust(size, b".")])
        commit(log)
    return log


def run_of(log: SegmentedLog, first: int = 0, end: int | None = None) -> bytes:
    end = log.written_position if end is None else end
    data = b""
    while first + len(data) < end:
        data += log.read(first + len(data), end - first - len(data))
    return data


def bodies(log: SegmentedLog) -> list[bytes]:
    return [bytes(entry.body) for entry in log.entries(log.start_position)]


def starts(log: SegmentedLog) -> list[int]:
    return [entry.position for entry in log.entries(log.start_position)]


def test_what_a_leader_may_send_unanswered_fits_whatever_may_wait_of_its_own() -> None:
    """Small as that may be: a follower whose disk is slow would end its stream."""
    leader = opened(FaultyDisk(), segment_bytes=32 << 20)
    while leader.written_position < UNANSWERED_BYTES_MAX:
        leader.append(1, [bytes(CHUNK_BYTES_MAX // 2)])
        commit(leader)
    follower = opened(FaultyDisk(), segment_bytes=32 << 20, pending_bytes_max=1 << 20)
    while follower.end_position < leader.end_position:
        run = leader.read_run(follower.end_position, CHUNK_BYTES_MAX)
        follower.extend(follower.end_position, [run])
    with pytest.raises(LogFull):
        follower.append(1, [b"of its own"])
    commit(follower)
    assert starts(follower) == starts(leader)


def test_a_log_is_extended_byte_by_byte() -> None:
    leader = leading()
    follower = opened(FaultyDisk(), segment_bytes=400)
    middle = starts(leader)[3]
    assert follower.extend(0, [run_of(leader, 0, middle)]) == middle
    follower.extend(middle, [run_of(leader, middle)])
    commit(follower)
    assert run_of(follower) == run_of(leader)
    assert bodies(follower) == bodies(leader)
    assert follower.durable_position == leader.durable_position
    assert [segment.start for segment in follower.segments] == [0, middle]


def test_entries_of_its_own_follow_those_of_another_in_one_group() -> None:
    leader = leading(2)
    follower = opened(FaultyDisk(), segment_bytes=10_000)
    end = follower.extend(0, [run_of(leader)])
    assert follower.append(2, [b"mine"])[0] == end
    group = follower.write_pending()
    assert group is not None
    assert group.end_position == follower.end_position
    assert bodies(follower) == [*bodies(leader), b"mine"]


@pytest.mark.parametrize("cut", [1, 31, 33, 100])
def test_an_entry_that_is_not_whole_is_refused(cut: int) -> None:
    run = run_of(leading(2))
    follower = opened(FaultyDisk())
    with pytest.raises(InvalidEntryError, match="no whole entry"):
        follower.extend(0, [run[: len(run) - cut]])
    assert (follower.end_position, follower.pending_bytes) == (0, 0)


def test_entries_of_another_place_are_refused() -> None:
    leader = leading(3)
    second = starts(leader)[1]
    follower = opened(FaultyDisk())
    with pytest.raises(InvalidEntryError, match=f"belongs at position {second}, not at 0"):
        follower.extend(0, [run_of(leader, second)])
    with pytest.raises(ValueError, match=f"the log ends at 0, not at {second}"):
        follower.extend(second, [run_of(leader, second)])


def test_what_is_committed_goes_into_the_entries() -> None:
    log = opened(FaultyDisk())
    committed = [0, 0, 40, 10_000]
    log.committed = lambda: committed.pop(0)
    for _ in range(3):
        log.append(1, [b"12345678"])
        commit(log)
    # More than is durable here is never claimed.
    log.append(1, [b""])
    durable = log.durable_position
    commit(log)
    assert [entry.synced_position for entry in log.entries(0)] == [0, 0, 40, durable]


def test_a_log_alone_writes_what_a_segmented_log_writes() -> None:
    disks = [FaultyDisk(), FaultyDisk()]
    for kind, disk in zip((SegmentedLog, ReplicaLog), disks, strict=True):
        log = kind.open(DIRECTORY, disk, segment_bytes=1000)
        list(log.recover())
        for number in range(20):
            log.append(1, [bytes(number * 11)])
            if number % 3 == 0:
                commit(log)
        commit(log)
    one, other = disks
    assert one.paths == other.paths
    assert [one.content(path) for path in one.paths] == [other.content(path) for path in one.paths]
    assert one.operations == other.operations


def test_the_floor_of_what_was_committed_is_read_from_the_entries() -> None:
    leader = leading()
    last = list(leader.entries(0))[-1]
    disk = FaultyDisk()
    follower = opened(disk)
    follower.extend(0, [run_of(leader)])
    commit(follower)
    again = opened(disk.after_kill())
    assert again.committed_floor == last.synced_position == last.position
    again = ReplicaLog.open(DIRECTORY, disk.after_kill(), segment_bytes=1000)
    list(again.recover(last.end))
    assert again.committed_floor == last.end


# -- catching up


def test_a_log_that_is_behind_notes_it_before_it_writes_what_claims_more() -> None:
    leader = leading()
    disk = FaultyDisk()
    follower = opened(disk)
    follower.extend(0, [run_of(leader, 0, starts(leader)[1])])  # claims nothing
    commit(follower)
    assert not follower.catching_up
    follower.extend(follower.end_position, [run_of(leader, follower.end_position)])
    assert not disk.exists(FLAG)
    follower.write_group()
    assert follower.catching_up
    assert disk.after_power_cut(None).exists(FLAG)
    with pytest.raises(ValueError, match="is claimed to be durable"):
        follower.caught_up()
    follower.sync()
    follower.caught_up()
    assert not disk.after_power_cut(None).exists(FLAG)
    follower.caught_up()


class FailingNames(FaultyDisk):
    """Raises `error` at the next sync of a directory."""

    error: Exception | None = None

    def fsync_dir(self, path: str) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        super().fsync_dir(path)


def caught_up_but_for_its_note() -> tuple[FailingNames, ReplicaLog]:
    leader = leading()
    disk = FailingNames()
    follower = opened(disk)
    follower.extend(0, [run_of(leader)])
    commit(follower)
    assert follower.catching_up
    return disk, follower


def test_a_disk_that_fails_as_the_note_goes_is_not_asked_again() -> None:
    """The kernel tells of what it dropped once: another sync would prove nothing."""
    disk, follower = caught_up_but_for_its_note()
    disk.error = DiskFailed("fsync /log")
    with pytest.raises(DiskFailed, match="fsync /log"):
        follower.caught_up()
    with pytest.raises(DiskFailed, match="fsync /log"):
        follower.caught_up()
    with pytest.raises(DiskFailed, match="fsync /log"):
        follower.append(1, [b"more"])


def test_without_space_the_note_goes_later() -> None:
    disk, follower = caught_up_but_for_its_note()
    disk.error = DiskFull("fsync /log")
    with pytest.raises(DiskFull):
        follower.caught_up()
    follower.caught_up()
    assert not follower.catching_up
    assert not disk.after_power_cut(None).exists(FLAG)


def test_a_log_in_sync_notes_nothing() -> None:
    leader = leading()
    disk = FaultyDisk()
    follower = opened(disk)
    for entry in leader.entries(0):
        follower.extend(entry.position, [run_of(leader, entry.position, entry.end)])
        commit(follower)
    assert not follower.catching_up
    assert FLAG not in disk.paths


def behind_with_a_hole(*, noted: bool, segment_bytes: int = 100_000) -> tuple[FaultyDisk, int]:
    """All entries came in one write, of which the power failure took the fourth."""
    leader = leading()
    disk = FaultyDisk()
    follower = opened(disk, segment_bytes=segment_bytes)
    for entry in leader.entries(0):
        follower.extend(entry.position, [run_of(leader, entry.position, entry.end)])
        follower.write_group()
    if noted:
        assert follower.catching_up
    else:
        disk.unlink(FLAG)
    fourth = starts(leader)[3]
    segment = [s for s in follower.segments if s.start <= fourth][-1]
    disk.overwrite(segment.path, fourth - segment.start + 40, b"torn")
    return disk, fourth


def test_behind_it_is_cut_at_the_first_invalid_entry() -> None:
    disk, fourth = behind_with_a_hole(noted=True)
    assert not any(finding.damage for finding in check_log(DIRECTORY, disk))
    log = opened(disk.after_kill(), segment_bytes=100_000)
    assert log.end_position == log.durable_position == fourth
    assert log.catching_up
    log.caught_up()
    assert not log.catching_up


def test_behind_it_is_cut_in_an_earlier_segment_too() -> None:
    disk, fourth = behind_with_a_hole(noted=True, segment_bytes=300)
    log = opened(disk.after_kill(), segment_bytes=300)
    assert log.end_position == log.durable_position == fourth
    assert [bytes(b).strip(b".") for b in bodies(log)] == [b"0", b"1", b"2"]
    log.append(1, [b"on it goes"])
    commit(log)
    assert bodies(log)[-1] == b"on it goes"


@pytest.mark.parametrize("segment_bytes", [300, 100_000])
def test_in_sync_the_same_hole_is_damage(segment_bytes: int) -> None:
    disk, _ = behind_with_a_hole(noted=False, segment_bytes=segment_bytes)
    with pytest.raises(CorruptLog):
        opened(disk.after_kill(), segment_bytes=segment_bytes)


# -- truncate


@pytest.mark.parametrize("segment_bytes", [150, 400, 100_000])
@pytest.mark.parametrize("kept", range(9))
def test_a_log_is_truncated_at_an_entry(kept: int, segment_bytes: int) -> None:
    leader = leading()
    disk = FaultyDisk()
    log = opened(disk, segment_bytes=segment_bytes)
    for entry in leader.entries(0):
        log.append(1, [entry.body])
        commit(log)
    position = [*starts(leader), leader.end_position][kept]
    log.truncate(position)
    assert log.end_position == log.written_position == log.durable_position == position
    assert bodies(log) == bodies(leader)[:kept]
    aside = [path for path in disk.paths if ".broken-" in path]
    assert bool(aside) == (kept < 8)
    assert log.append(1, [b"anew"])[0] == position
    commit(log)
    again = opened(disk.after_power_cut(None), segment_bytes=segment_bytes)
    assert bodies(again) == [*bodies(leader)[:kept], b"anew"]
    assert again.was_durable_to <= again.end_position


def test_what_waits_goes_with_a_truncation() -> None:
    log = opened(FaultyDisk())
    log.append(1, [b"a"])
    commit(log)
    end = log.end_position
    log.append(1, [b"b"])
    log.write_group()
    log.append(1, [b"c"])
    log.truncate(end)
    assert (log.pending_bytes, log.write_pending()) == (0, None)
    assert bodies(log) == [b"a"]


def test_what_waits_before_it_is_written() -> None:
    log = opened(FaultyDisk())
    log.append(1, [b"a"])
    end = log.end_position
    log.append(1, [b"b"])
    log.truncate(end)
    assert bodies(log) == [b"a"]
    assert log.durable_position == end


def test_a_truncation_within_an_entry_is_refused() -> None:
    log = leading()
    for position in (8, starts(log)[2] + 8, log.end_position + 8):
        with pytest.raises(ValueError, match=r"no entry begins|is not in the log"):
            log.truncate(position)
    assert len(bodies(log)) == 8


def test_a_truncation_that_finds_no_space_is_tried_again() -> None:
    disk = FaultyDisk()
    log = opened(disk)
    for size in (10, 600):
        log.append(1, [b"x" * size])
        commit(log)
    disk.capacity_bytes = disk.used_bytes() + 10
    with pytest.raises(DiskFull):
        log.truncate(starts(log)[1])
    assert len(bodies(log)) == 2
    disk.capacity_bytes = None
    log.truncate(starts(log)[1])
    assert len(bodies(log)) == 1


def test_space_taken_in_advance_is_room_for_what_a_truncation_keeps_aside() -> None:
    disk = FaultyDisk()
    log = opened(disk)
    for size in (10, 300):
        log.append(1, [b"x" * size])
        commit(log)
    position = starts(log)[1]
    disk.capacity_bytes = disk.used_bytes()
    log.truncate(position)
    assert bodies(log) == [b"x" * 10]
    assert bodies(opened(disk.after_kill())) == [b"x" * 10]
    assert any(path.endswith(f".broken-{position}") for path in disk.paths)


def test_a_truncation_that_finds_no_space_leaves_all_that_was_written() -> None:
    """Also zeros at its end, which are no space that was taken in advance."""
    disk = FaultyDisk()
    log = opened(disk)
    written = [b"x" * 10, b"x" * 600 + bytes(200)]
    for body in written:
        log.append(1, [body])
        commit(log)
    disk.capacity_bytes = disk.used_bytes() + 10
    with pytest.raises(DiskFull):
        log.truncate(starts(log)[1])
    assert bodies(log) == written
    assert bodies(opened(disk.after_kill())) == written
    disk.capacity_bytes = None
    log.append(1, [b"next"])
    commit(log)
    assert bodies(opened(disk.after_power_cut(None))) == [*written, b"next"]


@pytest.mark.parametrize("syncs_done", [1, 2])
def test_a_log_whose_truncation_was_cut_short_takes_no_more(
    syncs_done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four segments two are to go; too many files are open when one, or both, have gone."""
    disk = FaultyDisk()
    log = opened(disk, segment_bytes=150)
    for number in range(4):
        log.append(1, [str(number).encode() * 100])
        commit(log)
    position = starts(log)[1]
    done = []
    sync = disk.fsync_dir

    def fsync_dir(path: str) -> None:
        if len(done) == syncs_done:
            raise DiskFull("open: too many open files")
        done.append(path)
        sync(path)

    monkeypatch.setattr(disk, "fsync_dir", fsync_dir)
    with pytest.raises(DiskFailed, match="cut short"):
        log.truncate(position)
    monkeypatch.undo()
    with pytest.raises(DiskFailed):
        log.append(1, [b"written to a file that is the log's no more"])
    again = opened(disk.after_kill(), segment_bytes=150)
    assert again.end_position >= position
    assert again.was_durable_to <= again.end_position
    again.truncate(position)
    assert bodies(again) == [b"0" * 100]


def test_retention_removes_a_segment_while_a_log_is_truncated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk()
    log = opened(disk, segment_bytes=150)
    for number in range(5):
        log.append(1, [str(number).encode() * 100])
        commit(log)
    position = starts(log)[2]
    keep_aside = recovery.keep_aside

    def and_retain(*arguments: Any) -> str | None:
        log.delete_before(starts(log)[1])
        return keep_aside(*arguments)

    monkeypatch.setattr(recovery, "keep_aside", and_retain)
    log.truncate(position)
    log.append(1, [b"anew"])
    commit(log)
    assert bodies(log) == [b"1" * 100, b"anew"]
    assert bodies(opened(disk.after_kill(), segment_bytes=150)) == [b"1" * 100, b"anew"]


@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_segment_that_was_begun_without_space_for_more_goes_with_what_it_was_for(
    begins_anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk()
    log = opened(disk, segment_bytes=300)
    for number in range(2):
        log.append(1, [str(number).encode() * 100])
        commit(log)
    log.append(1, [b"2" * 100])  # of another segment

    def fsync_dir(path: str) -> None:
        raise DiskFull(f"open {path}: too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "fsync_dir", fsync_dir)
        with pytest.raises(DiskFull):
            log.write_pending()
    if begins_anew:
        log.begin_at(800)
    else:
        log.truncate(starts(log)[1])
    for number in range(3, 6):
        log.append(1, [str(number).encode() * 160])
        commit(log)
    again = opened(disk.after_kill(), segment_bytes=300)
    assert bodies(again) == bodies(log)


def test_a_writer_tells_again_what_is_written_after_a_truncation() -> None:
    told: list[int] = []
    log = opened(FaultyDisk())
    first = log.append(1, [b"first"])[1]
    log.append(1, [b"second" * 50])
    writer = LogWriter(log, told.append, pytest.fail)
    writer.start()
    writer.stop()
    writer = LogWriter(log, told.append, pytest.fail)
    writer.truncate(first)
    end = log.append(1, [b"3"])[1]
    told.clear()
    writer.start()
    writer.stop()
    assert told == [end]
    assert bodies(log) == [b"first", b"3"]


def test_only_a_log_with_replicas_is_truncated() -> None:
    log = SegmentedLog.open(DIRECTORY, FaultyDisk())
    list(log.recover())
    with pytest.raises(TypeError, match="only a log with replicas"):
        LogWriter(log, lambda _: None, lambda _: None).truncate(0)


# -- begin_at


@pytest.mark.parametrize("position", [0, 96, 1 << 40])
def test_an_empty_log_begins_where_a_snapshot_ends(position: int) -> None:
    disk = FaultyDisk()
    log = opened(disk)
    log.begin_at(position)
    assert (log.start_position, log.end_position, log.durable_position) == (position,) * 3
    there = opened(disk.after_power_cut(None))
    assert (there.start_position, there.end_position) == (position, position)
    assert log.append(1, [b"a"])[0] == position
    commit(log)
    assert bodies(opened(disk.after_power_cut(None))) == [b"a"]


def test_what_was_there_goes_when_a_log_begins_elsewhere() -> None:
    log = leading()
    log.begin_at(400)
    assert bodies(log) == []
    with pytest.raises(ValueError, match="cannot begin at 401"):
        log.begin_at(401)


# -- reading


def test_runs_are_whole_entries() -> None:
    log = leading(8, 100)  # entries of 136 bytes, seven a segment
    assert len(log.read_run(0, 300)) == 272
    assert len(log.read_run(0, 10)) == 136  # one at least
    assert len(log.read_run(0, 100_000)) == 7 * 136  # of one segment
    assert [e.position for e in record.split(log.read_run(136, 300))] == [136, 272]
    with pytest.raises(IndexError):
        log.read_run(log.written_position, 100)


def test_a_checksum_is_of_the_bytes_wherever_segments_end() -> None:
    log = leading(20, 100)
    assert len(log.segments) == 3
    whole = b"".join(bytes(log.read(each.start, 1 << 20)) for each in log.segments)
    for start, end in ((0, log.written_position), (500, 2_001), (136, 136)):
        assert log.checksum(start, end) == record.crc32c(0, whole[start:end])
    with pytest.raises(IndexError):
        log.checksum(0, log.written_position + 1)


def test_damage_between_entries_is_found_wherever_it_lies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_log, "_SEARCH_BYTES", 200)  # entries of 136 bytes
    log = leading(20, 100)
    log.verify(500, log.written_position)
    log.delete_before(log.segments[1].start)
    log._boundaries.clear()  # it is far behind the end
    log.verify(log.start_position, log.written_position)
    segment = log.segments[-1]
    log.verify(segment.start + 300, log.written_position)
    log._disk.open(segment.path).pwritev([b"other"], 196)
    log.verify(log.start_position, segment.start + 136)
    with pytest.raises(CorruptLog):
        log.verify(segment.start + 200, log.written_position)
    log._disk.open(segment.path).pwritev([b"other"], 60)  # nor is there a whole one before
    with pytest.raises(CorruptLog, match=f"position {segment.start}:"):
        log.verify(segment.start + 200, log.written_position)


def test_who_looks_for_an_entry_takes_no_copy_of_one_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a body that is longer than what is looked through at once."""
    monkeypatch.setattr(replica_log, "_SEARCH_BYTES", 64)
    log = leading(1, 100)
    log.append(1, [bytes(log.read(0, 136)) * 4])
    log.append(1, [b"last"])
    log.write_pending()
    assert [log._begin_before(at) for at in (0, 136, 600, 712, 744)] == [0, 0, 136, 136, 712]


def test_who_wrote_a_group_tells_it() -> None:
    log = opened(FaultyDisk())
    told: list[int] = []
    log.on_written(0)  # nobody listens, but always may: a thread may be about to call it
    log.on_written = told.append
    end = log.append(1, [b"a"])[1]
    log.write_group()
    assert (told, log.durable_position) == ([end], 0)
    assert log.write_group() is None
    assert told == [end]


def test_an_epoch_is_described() -> None:
    log = opened(FaultyDisk())
    log.append(epoch.KIND, [epoch.encode(3, b"\xab" * 16, 1_700_000_000_000)])
    commit(log)
    (entry,) = log.entries(0)
    assert describe(entry) == (
        f"position=0 length=64 kind=32 synced=0 epoch=3 disk={'ab' * 16}"
        " stored=2023-11-14T22:13:20.000+00:00"
    )
    with pytest.raises(ValueError, match="16 bytes"):
        epoch.encode(3, b"short", 0)
    with pytest.raises(ValueError, match="body has 8 bytes"):
        epoch.decode(bytes(8))
