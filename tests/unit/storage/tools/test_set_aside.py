"""One damaged entry is given up; every other one stays where it is."""

import errno
import os
from pathlib import Path

import pytest

from duemq_server.storage import recovery
from duemq_server.storage.__main__ import main
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.durable_mark import FILE_NAME
from duemq_server.storage.errors import CorruptLog
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.log_parts.worn_file import PAGE_BYTES
from duemq_server.storage.replicas import DISK_ID_FILE
from duemq_server.storage.segment import path_of
from duemq_server.storage.tools.check import check_log
from duemq_server.storage.tools.cut import cut
from duemq_server.storage.tools.set_aside import GAP, set_aside
from tests.crash.faulty_disk import FaultyDisk, FaultyFile

LOG = "/log"
SEGMENT = LOG + "/" + "0" * 20


def written(disk: FaultyDisk, entries: int = 10, kind: int = 1) -> list[int]:
    log = SegmentedLog.open(LOG, disk, segment_bytes=1 << 20)
    for _ in log.recover(0):
        pass
    at = [log.append(kind, [b"%d" % n * 100])[0] for n in range(entries)]
    while log.write_pending():
        pass
    log.close()
    return at


def bodies(disk: FaultyDisk) -> list[tuple[int, int, bytes]]:
    log = SegmentedLog.open(LOG, disk, segment_bytes=1 << 20)
    found = [(each.position, each.kind, bytes(each.body)) for each in log.recover(0)]
    log.close()
    return found


@pytest.mark.parametrize("at", [0, 4, 8, 12, 60])  # crc, magic, length, body length, body
def test_all_but_the_damaged_entry_is_there_again(at: int) -> None:
    disk = FaultyDisk()
    positions = written(disk)
    damaged = positions[3]
    disk.flip(SEGMENT, damaged + at, 3)
    with pytest.raises(CorruptLog, match=f"set-aside {LOG} --at {damaged}"):
        bodies(disk)
    path, end = set_aside(LOG, damaged, disk)
    assert end == positions[4]
    found = bodies(disk.after_kill())
    assert [position for position, _, _ in found] == positions
    assert [kind for _, kind, _ in found] == [1] * 3 + [GAP] + [1] * 6
    assert len(disk.content(path)) == end - damaged


def test_a_try_that_was_cut_short_is_repeated_with_the_first_copy() -> None:
    disk = FaultyDisk()
    positions = written(disk)
    disk.flip(SEGMENT, positions[3] + 60, 3)
    path, end = set_aside(LOG, positions[3], disk)
    kept = bytes(disk.content(path))
    disk.flip(SEGMENT, positions[3] + 2, 3)  # torn
    assert set_aside(LOG, positions[3], disk) == (path, end)
    assert bytes(disk.content(path)) == kept
    assert len(bodies(disk)) == 10


WORN = 10_000
PAGE, BEHIND_PAGE = WORN - WORN % PAGE_BYTES, WORN - WORN % PAGE_BYTES + PAGE_BYTES


def on_a_bad_sector(disk: FaultyDisk) -> tuple[list[int], int]:
    """Where entries lie, and the first that is lost with the page."""
    positions = written(disk, entries=100, kind=7)
    disk.wear_out(SEGMENT, WORN)
    damaged = max(position for position in positions if position <= PAGE)
    with pytest.raises(CorruptLog, match=f"Input/output error.*set-aside {LOG} --at {damaged}"):
        bodies(disk)
    return positions, damaged


def test_what_lies_on_a_bad_sector_is_found_and_given_up_like_other_damage() -> None:
    """Elsewhere nobody could say where it is, or get rid of it."""
    disk = FaultyDisk()
    positions, damaged = on_a_bad_sector(disk)
    told = [each.text for each in check_log(LOG, disk) if each.damage]
    unread = f"{PAGE_BYTES} bytes, in whole pages, cannot be read; sound up to position {damaged}"
    assert f"{SEGMENT}, offset {PAGE}: {unread}" in told
    assert any(f"position {damaged}:" in text for text in told)
    path, end = set_aside(LOG, damaged, disk)
    assert end == min(position for position in positions if position >= BEHIND_PAGE)
    found = bodies(disk)
    kept = [each for each in positions if each <= damaged or each >= end]
    assert [position for position, _, _ in found] == kept
    assert [position for position, kind, _ in found if kind == GAP] == [damaged]
    assert len(disk.content(path)) == end - damaged
    assert not [each for each in check_log(LOG, disk) if each.damage]


def test_a_log_is_cut_before_a_bad_sector() -> None:
    disk = FaultyDisk()
    positions, damaged = on_a_bad_sector(disk)
    [aside] = cut(LOG, damaged, disk)
    assert [each for each, _, _ in bodies(disk)] == [each for each in positions if each < damaged]
    assert disk.exists(aside)


def test_a_start_names_no_position_where_all_can_be_read_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who cut the log there would lose what is whole."""
    disk = FaultyDisk()
    written(disk)
    pread, failures = FaultyFile.pread, [OSError(errno.EIO, os.strerror(errno.EIO), SEGMENT)]

    def once(self: FaultyFile, length: int, offset: int, nowait: bool = False) -> memoryview:
        if failures and self.path == SEGMENT:
            raise failures.pop()
        return pread(self, length, offset, nowait)

    monkeypatch.setattr(FaultyFile, "pread", once)
    with pytest.raises(OSError, match=f"Input/output error: '{SEGMENT}'"):
        bodies(disk)
    assert len(bodies(disk)) == 10


@pytest.mark.parametrize("chunk", [recovery.CHUNK_BYTES, PAGE_BYTES], ids=["near", "far"])
def test_a_bad_sector_behind_the_entries_has_the_position_of_their_end(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is not read with them, but by who looks for more."""
    monkeypatch.setattr(recovery, "CHUNK_BYTES", chunk)
    disk = FaultyDisk()
    written(disk, kind=7)
    log = SegmentedLog.open(LOG, disk, segment_bytes=1 << 20)
    *_, last = log.recover(0)
    log.close()
    disk.open(SEGMENT).pwritev([b"\1" * (1 << 15)], last.end)
    disk.wear_out(SEGMENT, 1 << 14)
    with pytest.raises(CorruptLog, match=f"position {last.end}: Input/output error"):
        bodies(disk)
    unread, *others = [each for each in check_log(LOG, disk) if "entries" not in each.text]
    assert unread.damage
    assert f"sound up to position {last.end}" in unread.text
    assert not others  # a torn tail, say, that the next start cuts


def test_a_cut_of_what_cannot_be_read_is_known_for_a_loss_without_the_mark() -> None:
    """A power failure may have left one that is too low."""
    disk = FaultyDisk()
    end = written(disk)[-1]
    disk.wear_out(SEGMENT, 0)
    disk.unlink(f"{LOG}/{FILE_NAME}")
    assert cut(LOG, 0, disk) == []
    log = SegmentedLog.open(LOG, disk, segment_bytes=1 << 20)
    assert not list(log.recover(0))
    assert log.was_durable_to > end


def test_only_where_the_damage_begins() -> None:
    disk = FaultyDisk()
    positions = written(disk)
    with pytest.raises(ValueError, match="sound up to"):
        set_aside(LOG, positions[3], disk)
    disk.flip(SEGMENT, positions[3] + 60, 3)
    with pytest.raises(ValueError, match=f"sound up to {positions[3]}"):
        set_aside(LOG, positions[4], disk)
    with pytest.raises(ValueError, match="does not hold"):
        set_aside("/nothing", 0, disk)


def test_the_end_of_a_log_is_not_set_aside_but_cut() -> None:
    disk = FaultyDisk()
    positions = written(disk)
    disk.flip(SEGMENT, positions[-1] + 8, 7)
    with pytest.raises(ValueError, match="storage cut"):
        set_aside(LOG, positions[-1], disk)


def test_the_command_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["set-aside", str(tmp_path), "--at", "0"]) == 2
    assert "does not hold" in capsys.readouterr().err


def test_a_replica_gives_up_nothing_that_others_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once it leads, what it lacks would be missed by all who consume, and the others' logs have
    it."""
    log = SegmentedLog.open(str(tmp_path / "commitlog"), RealDisk(), segment_bytes=1 << 20)
    assert list(log.recover()) == []
    first, _ = log.append(1, [b"one" * 100])
    log.append(1, [b"two" * 100])
    log.write_pending()
    log.close()
    segment = Path(path_of(log.directory, 0))
    damaged = bytearray(segment.read_bytes())
    damaged[first + 60] ^= 1
    segment.write_bytes(damaged)
    (tmp_path / DISK_ID_FILE).write_bytes(b"")
    command = ["set-aside", log.directory, "--at", str(first)]
    assert main(command) == 2
    assert "is a replica's: empty it" in capsys.readouterr().err
    assert segment.read_bytes() == damaged
    assert main([*command, "--last-copy"]) == 0
