from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from duemq_server.storage.disk import DiskFile
from duemq_server.storage.errors import CorruptFile, DiskFailed, DiskFull
from duemq_server.storage.indexes import index as index_module
from duemq_server.storage.indexes.index import FixedIndex
from tests.crash.faulty_disk import FaultyDisk

PATH = "/queues/0"
PER_FILE = 10


def opened(disk: FaultyDisk) -> FixedIndex:
    return FixedIndex(PATH, disk, 8, file_bytes=PER_FILE * 8)


def entries(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in numbers)


def read_all(index: FixedIndex) -> list[int]:
    numbers: list[int] = []
    while (at := index.first + len(numbers)) < index.end:
        page = index.read(at, 1000)
        numbers += [int.from_bytes(page[i : i + 8], "little") for i in range(0, len(page), 8)]
    return numbers


def filled(disk: FaultyDisk, count: int) -> FixedIndex:
    index = opened(disk)
    index.append(entries(*range(count)))
    return index


def test_an_unused_index_leaves_no_trace() -> None:
    disk = FaultyDisk()
    index = opened(disk)
    index.sync()
    assert (index.first, index.end, read_all(index)) == (0, 0, [])
    assert not disk.exists(PATH)


def test_entries_are_read_from_memory_and_from_files() -> None:
    index = filled(FaultyDisk(), 25)
    assert read_all(index) == list(range(25))
    index.flush()
    index.append(entries(25, 26))
    assert read_all(index) == list(range(27))
    assert bytes(index.read(23, 100)) == entries(23, 24)
    assert bytes(index.read(25, 1)) == entries(25)
    assert bytes(index.read(27, 5)) == b""


def test_names_that_too_many_open_files_kept_from_the_disk_are_synced_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk()
    index = filled(disk, 25)

    def fail(path: str) -> None:
        raise DiskFull(f"open {path}: too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "fsync_dir", fail)
        with pytest.raises(DiskFull):
            index.sync()
    assert index.dirty
    index.sync()
    assert read_all(opened(disk.after_power_cut(None))) == list(range(25))


def test_many_small_appends_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "FLUSH_BYTES", 64)
    disk = FaultyDisk()
    index = opened(disk)
    for number in range(40):
        index.append(entries(number))
    assert disk.operations < 20
    assert read_all(index) == list(range(40))


def test_synced_entries_survive_a_power_cut() -> None:
    disk = FaultyDisk()
    index = filled(disk, 25)
    index.sync()
    index.append(entries(*range(25, 40)))
    index.flush()
    again = opened(disk.after_power_cut(None))
    assert read_all(again) == list(range(25))
    assert again.end == 25


def test_it_is_dirty_until_everything_is_synced() -> None:
    disk = FaultyDisk()
    index = opened(disk)
    assert not index.dirty
    index.append(entries(0))
    assert index.dirty
    index.flush()
    assert index.dirty
    index.sync()
    assert not index.dirty
    index.truncate(0)
    assert index.dirty


def test_flushed_entries_survive_a_kill() -> None:
    disk = FaultyDisk()
    filled(disk, 33).flush()
    assert read_all(opened(disk.after_kill())) == list(range(33))


def test_a_file_that_is_lost_is_no_gap() -> None:
    disk = FaultyDisk()
    filled(disk, 45).sync()
    disk.unlink(f"{PATH}/{PER_FILE:020d}")
    index = opened(disk)
    with pytest.raises(CorruptFile, match="gone"):
        index.truncate(45)
    index.truncate(PER_FILE)  # it is not needed for that
    assert read_all(opened(disk)) == list(range(PER_FILE))


def test_what_is_made_anew_has_lost_no_file() -> None:
    disk = FaultyDisk()
    filled(disk, 45).sync()
    disk.unlink(f"{PATH}/{PER_FILE:020d}")
    index = opened(disk)
    index.reset(0)
    index.append(entries(*range(45)))
    index.truncate(44)
    assert read_all(index) == list(range(44))


@pytest.mark.parametrize("number", [21, 29, 31, 45])
def test_a_gap_behind_a_full_file_is_no_lost_one(number: int) -> None:
    disk = FaultyDisk()
    index = filled(disk, 2 * PER_FILE)
    index.skip_to(number)
    index.append(entries(number, number + 1))
    index.sync()
    again = opened(disk.after_power_cut(None))
    again.truncate(number + 1)
    assert again.present(2 * PER_FILE) == number
    assert bytes(again.read(number, 5)) == entries(number)


@pytest.mark.parametrize("end", [0, 1, 9, 10, 11, 20, 24, 25])
def test_an_index_is_cut_at_any_entry(end: int) -> None:
    disk = FaultyDisk()
    index = filled(disk, 25)
    index.truncate(end)
    assert read_all(index) == list(range(end))
    index.append(entries(*range(end, 30)))
    index.sync()
    assert read_all(index) == list(range(30))
    assert read_all(opened(disk.after_power_cut(None))) == list(range(30))


def test_an_index_that_is_too_short_says_so() -> None:
    index = filled(FaultyDisk(), 5)
    with pytest.raises(IndexError, match="cannot be cut at 6: it holds 0 to 5"):
        index.truncate(6)


def test_old_entries_are_dropped_and_done_files_removed() -> None:
    disk = FaultyDisk()
    index = filled(disk, 35)
    index.flush()
    index.drop_before(23)
    assert len(disk.listdir(PATH)) == 4
    index.remove_before(23)
    assert (index.first, index.end) == (23, 35)
    assert disk.listdir(PATH) == [f"{20:020d}", f"{30:020d}"]
    assert read_all(index) == list(range(23, 35))
    with pytest.raises(IndexError, match="entry 22 is gone, the first is 23"):
        index.read(22, 1)
    assert opened(disk.after_kill()).first == 20


class Meanwhile:
    """In place of a lock: what another thread does just before somebody gets it, once."""

    def __init__(self, lock: threading.Lock, does: Callable[[], None]) -> None:
        self._lock, self._does = lock, [does]

    def __enter__(self) -> None:
        while self._does:
            self._does.pop()()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_what_is_dropped_while_it_is_read_is_gone_and_not_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drop() -> None:
        index.drop_before(23)
        index.remove_before(23)

    index = filled(FaultyDisk(), 35)
    index.flush()
    monkeypatch.setattr(index, "_lock", Meanwhile(index._lock, drop))
    with pytest.raises(IndexError, match="entry 3 is gone, the first is 23"):
        index.read(3, 1)

    index = filled(FaultyDisk(), 35)
    index.flush()
    get = index._files.get

    def slow(path: str) -> DiskFile:
        drop()
        return get(path)

    monkeypatch.setattr(index._files, "get", slow)
    with pytest.raises(IndexError, match="entry 3 is gone, the first is 23"):
        index.read(3, 1)
    assert read_all(index) == list(range(23, 35))


def test_a_file_that_retention_did_not_remove_is_missed() -> None:
    disk = FaultyDisk()
    filled(disk, 35).close()
    index = opened(disk)
    disk.unlink(f"{PATH}/{0:020d}")
    index._files.forget(f"{PATH}/{0:020d}")
    with pytest.raises(FileNotFoundError):
        index.read(3, 1)


def test_a_reset_index_starts_where_it_is_told() -> None:
    disk = FaultyDisk()
    index = filled(disk, 15)
    index.flush()
    index.reset(1000)
    assert (index.first, index.end) == (1000, 1000)
    index.append(entries(1000, 1001))
    index.sync()
    assert read_all(opened(disk.after_power_cut(None))) == [1000, 1001]


def test_a_full_disk_refuses_an_append_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "FLUSH_BYTES", 64)
    disk = FaultyDisk(capacity_bytes=0)
    index = filled(disk, 8)
    with pytest.raises(DiskFull):
        index.append(entries(8))
    assert read_all(index) == list(range(8))
    disk.capacity_bytes = None
    index.append(entries(8))
    assert read_all(index) == list(range(9))


def test_half_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="12 bytes are not whole entries of 8"):
        opened(FaultyDisk()).append(b"x" * 12)


def test_a_hole_is_an_error_and_not_zeros() -> None:
    disk = FaultyDisk()
    index = filled(disk, 25)
    index.flush()
    disk.chop(f"{PATH}/{10:020d}", 5 * 8)
    with pytest.raises(CorruptFile, match="entries are missing"):
        index.read(12, 8)


def test_cold_entries_are_refused_to_a_reader_that_cannot_wait() -> None:
    disk = FaultyDisk(cold=True)
    index = filled(disk, 5)
    assert len(index.read(0, 5, nowait=True)) == 40
    index.flush()
    with pytest.raises(BlockingIOError):
        index.read(0, 5, nowait=True)
    assert len(index.read(0, 5)) == 40


def test_a_sync_in_another_thread_loses_nothing_that_is_appended_meanwhile() -> None:
    index = opened(FaultyDisk())
    done = threading.Event()

    def sync() -> None:
        while not done.is_set():
            index.sync()

    thread = threading.Thread(target=sync)
    thread.start()
    for number in range(3000):
        index.append(entries(number))
    done.set()
    thread.join()
    assert read_all(index) == list(range(3000))


def test_an_index_that_was_emptied_is_reopened_where_it_goes_on() -> None:
    disk = FaultyDisk()
    index = filled(disk, 3)
    index.reset(7)
    index.sync()
    index.close()
    again = opened(disk)
    assert (again.first, again.end) == (7, 7)


def with_gaps(disk: FaultyDisk) -> FixedIndex:
    """0 to 5, then 40 and 41, then nothing yet from 100 on."""
    index = filled(disk, 6)
    index.skip_to(40)
    index.append(entries(40, 41))
    index.skip_to(60)
    index.skip_to(100)
    return index


def check_gaps(index: FixedIndex) -> None:
    assert (index.first, index.end) == (0, 100)
    assert [index.last_before(n) for n in (0, 1, 6, 40, 41, 42, 100)] == [-1, 0, 5, 5, 40, 41, 41]
    assert [index.present(n) for n in (0, 5, 6, 39, 40, 41, 42, 99, 100)] == [
        *(0, 5, 40, 40, 40, 41, 100, 100, 100)
    ]
    assert [index.count(n) for n in (0, 5, 6, 39, 40, 41, 42, 100)] == [8, 3, 2, 2, 2, 1, 0, 0]
    assert len(index.read(5, 10)) == 8
    assert bytes(index.read(40, 10)) == entries(40, 41)
    for number in (6, 39, 42, 99):
        with pytest.raises(IndexError, match="was left out"):
            index.read(number, 1)
    assert len(index.read(100, 1)) == 0


def test_numbers_are_left_out_for_good() -> None:
    disk = FaultyDisk()
    index = with_gaps(disk)
    check_gaps(index)
    index.sync()
    for survivor in (disk.after_kill(), disk.after_power_cut(None)):
        again = opened(survivor)
        check_gaps(again)
        again.append(entries(100))
        assert (again.last_before(again.end), bytes(again.read(100, 1))) == (100, entries(100))


def test_a_gap_that_ends_where_a_full_file_would_is_still_seen() -> None:
    disk = FaultyDisk()
    index = filled(disk, PER_FILE + 1)
    index.skip_to(2 * PER_FILE)
    index.append(entries(7))
    index.sync()
    for each in (index, opened(disk)):
        assert each.present(PER_FILE + 1) == 2 * PER_FILE
        assert bytes(each.read(2 * PER_FILE, 1)) == entries(7)


@pytest.mark.parametrize("end", [0, 3, 6, 40, 41, 42, 100])
def test_an_index_with_gaps_is_cut_at_any_entries(end: int) -> None:
    disk = FaultyDisk()
    index = with_gaps(disk)
    index.sync()
    index.truncate(end)
    numbers = [n for n in (*range(6), 40, 41) if n < end]
    for each in (index, opened(disk)):
        assert each.end == end
        assert each.count(0) == len(numbers)
        assert [bytes(each.read(n, 1)) for n in numbers] == [entries(n) for n in numbers]
    index.append(entries(end))
    assert bytes(index.read(end, 1)) == entries(end)


@pytest.mark.parametrize("end", [7, 39, 43, 99])
def test_an_index_is_not_cut_inside_a_gap(end: int) -> None:
    with pytest.raises(IndexError):
        with_gaps(FaultyDisk()).truncate(end)


@pytest.mark.parametrize(("number", "first"), [(3, 3), (6, 40), (20, 40), (41, 41), (50, 100)])
def test_entries_are_dropped_up_to_a_gap_or_through_it(number: int, first: int) -> None:
    disk = FaultyDisk()
    index = with_gaps(disk)
    index.drop_before(number)
    index.remove_before(number)
    assert (index.first, index.end) == (first, 100)
    assert index.count(0) == sum(n >= first for n in (*range(6), 40, 41))


def test_an_empty_index_begins_anew_where_it_skips_to() -> None:
    disk = FaultyDisk()
    index = opened(disk)
    index.skip_to(9)
    index.append(entries(9))
    index.sync()
    again = opened(disk)
    assert (again.first, again.end, again.present(0)) == (9, 10, 0)


@pytest.mark.parametrize("count", [0, 3])
def test_numbers_that_cannot_be_left_out_for_want_of_space_are_given_as_before(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(FaultyDisk(), count)
    index.flush()

    def full(_: FaultyDisk, path: str, *, create: bool = False) -> DiskFile:
        raise DiskFull(f"{path}: no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(FaultyDisk, "open", full)
        with pytest.raises(DiskFull):
            index.skip_to(9)
    assert (index.first, index.end) == (0, count)
    index.append(entries(count))
    assert bytes(index.read(count, 1)) == entries(count)
    index.skip_to(9)
    assert index.end == 9


def test_after_a_failed_sync_no_other_proves_anything() -> None:
    disk = FaultyDisk()
    index = filled(disk, 2)
    disk.fail_sync_at = disk.syncs + 1
    for _ in range(2):
        with pytest.raises(DiskFailed):
            index.sync()
