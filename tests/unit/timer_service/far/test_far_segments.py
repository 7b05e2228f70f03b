import dataclasses
from contextlib import suppress
from random import Random

import numpy as np
import pytest

from duemq_server.storage.disk import DiskFile
from duemq_server.storage.errors import CorruptFile, DiskFull
from duemq_server.timer_service.far.far_block import ROW_BYTES, ROWS_MAX
from duemq_server.timer_service.far.far_segments import (
    DAY_MS,
    HOUR_MS,
    FarSegments,
    NumberTables,
    period_file,
)
from duemq_server.timer_service.far.loading import (
    WINDOW_BYTES,
    WINDOW_ROWS,
    Load,
    Window,
    Windows,
)
from duemq_server.timer_service.far.look_up import Query
from duemq_server.timer_service.far.memtable import Memtable
from duemq_server.timer_service.timers.keys import NOWHERE
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import Blob, Home, Rows, key_of, new_rows
from tests.crash.faulty_disk import FaultyDisk, PowerCut

NOW = 1_700_000_000_000
SOURCE = SourceId(77, 1)
TARGET = TargetId("b", "t", -1)
TABLES = NumberTables([SourceId(1, 0), SOURCE], [TargetId("x", "y", 0), TARGET])
MANY = 1 << 30


def timers(*due_ms: int) -> tuple[Rows, Blob]:
    """Timers with offsets 0, 1, … and bodies that say so."""
    rows = new_rows(len(due_ms))
    bodies = [b"body-%06d" % n for n in range(len(due_ms))]
    rows.wide[0], rows.wide[1] = due_ms, range(len(due_ms))
    rows.narrow[0], rows.narrow[1] = 1, 1
    rows.narrow[2] = [11 * n for n in range(len(due_ms))]
    rows.narrow[3] = 11
    rows.narrow[4], rows.narrow[5] = 5, 6
    return rows, Blob(b"".join(bodies), Home("", 0))


def segments_with(*due_ms: int, disk: FaultyDisk | None = None) -> FarSegments:
    segments = FarSegments("/segments", disk or FaultyDisk())
    flush = segments.flush([timers(*due_ms)], TABLES, NOW)
    flush.run()
    segments.flushed(flush)
    return segments


def run(segments: FarSegments, load: Load) -> list[tuple[int, int, bytes]]:
    """(due, offset, body) in the order loaded."""
    load.run()
    segments.loaded(load)
    found = []
    for piece in load.pieces:
        assert piece.sources == [SOURCE]
        assert piece.targets == [TARGET]
        for due_ms, offset, home, size in zip(
            piece.rows.due_ms.tolist(),
            piece.rows.offset.tolist(),
            piece.rows.home.tolist(),
            piece.rows.size.tolist(),
            strict=True,
        ):
            found.append((due_ms, offset, bytes(piece.blob.data[home : home + size])))
    return found


def load(segments: FarSegments, horizon_ms: int, rows: int = MANY) -> list[tuple[int, int, bytes]]:
    return run(segments, segments.load(horizon_ms, rows, MANY))


def find(segments: FarSegments, source: int, offset: int, due_ms: int) -> bool:
    """Whether a timer lies in a block, not loaded."""
    query = Query(
        np.array([source], dtype=np.uint32),
        np.array([offset]),
        np.array([due_ms]),
        np.array([0]),
    )
    look_up = segments.look_up([query], list(TABLES.sources).index)
    look_up.run()
    segments.looked_up(look_up)
    return any(place.row >= place.block.cursor for place in (each for _, each in query.places()))


@pytest.mark.parametrize(
    ("ahead_ms", "width_h"),
    [
        (-DAY_MS, 1),
        (0, 1),
        (2 * DAY_MS - 1, 1),
        (2 * DAY_MS, 24),
        (60 * DAY_MS, 720),
        (730 * DAY_MS, 8_640),
        (2_900_000 * DAY_MS, 8_640),
    ],
)
def test_the_further_away_the_wider_the_period(ahead_ms: int, width_h: int) -> None:
    start, width = period_file(NOW + ahead_ms, NOW).removesuffix(".due").split("-")

    assert int(width) == width_h
    assert int(start) * HOUR_MS <= NOW + ahead_ms < (int(start) + width_h) * HOUR_MS


def test_timers_are_loaded_in_due_order_up_to_the_horizon_with_their_bodies() -> None:
    segments = segments_with(NOW + 300, NOW + 100, NOW + 9_000_000, NOW + 200)

    assert load(segments, NOW + 300) == [
        (NOW + 100, 1, b"body-000001"),
        (NOW + 200, 3, b"body-000003"),
    ]
    assert segments.pending == 2
    assert segments.next_due_ms() == NOW + 300
    assert load(segments, NOW + DAY_MS) == [
        (NOW + 300, 0, b"body-000000"),
        (NOW + 9_000_000, 2, b"body-000002"),
    ]
    assert segments.next_due_ms() is None


def test_a_load_takes_no_more_than_it_may_the_first_due_first() -> None:
    segments = segments_with(*range(NOW + 10_000, NOW, -1))

    loaded = load(segments, NOW + DAY_MS, rows=3)

    assert [due_ms for due_ms, _, _ in loaded] == [NOW + 1, NOW + 2, NOW + 3]
    assert segments.pending == 9_997


def test_a_full_period_becomes_several_blocks() -> None:
    segments = segments_with(*range(NOW, NOW + 2 * ROWS_MAX + 1))

    assert sorted(each.count for each in segments.blocks()) == [1, ROWS_MAX, ROWS_MAX]
    assert len(load(segments, NOW + DAY_MS)) == 2 * ROWS_MAX + 1


def also(segments: FarSegments, *due_ms: int) -> None:
    """Another flush, whose block covers the same time."""
    flush = segments.flush([timers(*due_ms)], TABLES, NOW)
    flush.run()
    segments.flushed(flush)


@pytest.mark.parametrize("apart_ms", [0, 1, 50])
@pytest.mark.parametrize("blocks", [2, 7])
def test_blocks_of_one_time_are_loaded_in_due_order(blocks: int, apart_ms: int) -> None:
    """Also over the ends of windows, and of blocks that are of another time as well."""
    each = [NOW + apart_ms * n // 3 for n in range(3 * WINDOW_ROWS)]
    segments = segments_with(*each)
    for n in range(1, blocks):
        also(segments, *(due_ms + 100 * n for due_ms in each[: len(each) // n]))
    count, loaded = segments.pending, []
    while segments.pending:
        load, left = segments.load(NOW + HOUR_MS, 150, MANY), segments.pending
        found = sorted(due_ms for due_ms, _, _ in run(segments, load))
        assert len(found) == min(150, left)  # however dense one of the blocks is
        assert found[-1] <= (segments.next_due_ms() or NOW + HOUR_MS)
        loaded += found
    assert loaded == sorted(loaded)
    assert len(loaded) == count


def test_a_load_reads_what_fits_and_one_timer_at_least() -> None:
    segments = segments_with(*range(NOW, NOW + 10))
    also(segments, *range(NOW, NOW + 10))
    assert [each[0] for each in run(segments, segments.load(NOW + HOUR_MS, MANY, 30))] == [NOW] * 2
    assert len(run(segments, segments.load(NOW + HOUR_MS, MANY, 1))) == 1


class ReadsCounted(FaultyDisk):
    """Counts the files that are opened for reading."""

    opened = 0

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        self.opened += not create
        return super().open(path, create=create)


def test_the_next_loads_do_not_read_the_indexes_again() -> None:
    disk = ReadsCounted()
    due_ms = range(NOW, NOW + 3 * WINDOW_ROWS)
    segments = segments_with(*due_ms, disk=disk)
    for _ in range(20):
        also(segments, *due_ms)
    disk.opened = loads = 0
    while segments.pending:
        load(segments, NOW + HOUR_MS, rows=210)
        loads += 1
    # Bodies, once a load; indexes, for each half of a window at most.
    assert disk.opened <= loads + 21 * 3 * 2


def test_windows_are_bounded_and_a_window_is_of_its_block() -> None:
    segments = segments_with(*range(NOW, NOW + ROWS_MAX))
    also(segments, *range(NOW, NOW + ROWS_MAX))
    first, second = segments.blocks()
    indexes = [segments.index_of(each) for each in (first, second)]
    one = Window(first, indexes[0], 0, 100)
    windows = Windows(bytes_max=one.bytes)
    windows.put(one)
    assert windows.get(first) is one
    windows.put(Window(second, indexes[1], 0, 100))
    assert (windows.get(first), len(windows), windows.bytes) == (None, 1, one.bytes)
    assert windows.get(dataclasses.replace(second)) is None  # made anew at its place
    windows.drop(second)
    assert (len(windows), windows.bytes) == (0, 0)


@pytest.mark.parametrize("blocks", [1, 300, 10_000])
def test_windows_of_many_blocks_are_smaller_and_fit_together(blocks: int) -> None:
    bound = 32 << 20
    rows = Windows(bound).rows_ahead(blocks, 16_384)
    assert rows == {1: ROWS_MAX, 300: WINDOW_ROWS, 10_000: 78}[blocks]
    assert blocks * (rows * ROW_BYTES + WINDOW_BYTES) <= bound
    assert Windows(bound).rows_ahead(1_000_000, 16_384) == 1


def test_a_window_has_the_names_of_its_rows_only() -> None:
    """A block may name thousands of topics; windows of thousands of blocks may be kept."""
    targets = [TargetId("b", f"topic-{n}", -1) for n in range(2_000)]
    rows, blob = timers(*range(NOW, NOW + 2_000))
    rows.narrow[1] = range(2_000)
    segments = FarSegments("/segments", FaultyDisk())
    flush = segments.flush([(rows, blob)], NumberTables(TABLES.sources, targets), NOW)
    flush.run()
    segments.flushed(flush)
    [block] = segments.blocks()
    window = Window(block, segments.index_of(block), 100, 50)
    assert window.targets == targets[100:151]
    found = []
    while segments.pending:
        load = segments.load(NOW + HOUR_MS, 300, MANY)
        load.run()
        segments.loaded(load)
        for piece in load.pieces:
            found += [piece.targets[number] for number in piece.rows.target.tolist()]
    assert found == targets


def test_a_timer_is_found_by_its_due_time_until_it_is_loaded() -> None:
    segments = segments_with(NOW + 100, NOW + 200)

    assert find(segments, 1, 1, NOW + 200)
    assert not find(segments, 1, 1, NOW + 100)
    assert not find(segments, 1, 2, NOW + 200)
    assert not find(segments, 0, 1, NOW + 200)
    load(segments, NOW + 101)
    assert not find(segments, 1, 0, NOW + 100)
    assert find(segments, 1, 1, NOW + 200)


def test_parked_timers_wait_outside_of_the_due_order() -> None:
    segments = FarSegments("/segments", FaultyDisk())
    flush = segments.flush([timers(NOW - 5, NOW - 4)], TABLES, NOW, [TARGET])
    flush.run()
    segments.flushed(flush)

    assert segments.next_due_ms() is None
    assert segments.pending == 2
    assert segments.parked() == [TARGET]
    assert find(segments, 1, 0, NOW - 5)
    assert len(run(segments, segments.load_parked([TARGET], MANY, MANY))) == 2
    assert segments.parked() == []


def test_a_file_is_deleted_when_all_of_it_is_loaded_and_nobody_needs_it() -> None:
    disk = FaultyDisk()
    segments = segments_with(NOW + 100, NOW + 3 * HOUR_MS, disk=disk)
    first = period_file(NOW + 100, NOW)
    load(segments, NOW + 101)

    segments.delete_done({first})
    assert len(segments.lengths) == 2
    segments.delete_done(set())

    assert disk.listdir("/segments") == [period_file(NOW + 3 * HOUR_MS, NOW)]
    assert list(segments.lengths) == disk.listdir("/segments")


def test_recovery_cuts_and_removes_what_the_checkpoint_does_not_know() -> None:
    disk = FaultyDisk()
    segments = segments_with(NOW + 100, disk=disk)
    lengths, blocks = dict(segments.lengths), segments.blocks()
    flush = segments.flush([timers(NOW + 150, NOW + 3 * HOUR_MS)], TABLES, NOW)
    flush.run()

    again = FarSegments("/segments", disk)
    again.recover(lengths, blocks)

    assert disk.listdir("/segments") == list(lengths)
    assert len(load(again, NOW + DAY_MS)) == 1


def test_a_missing_or_short_file_refuses_to_start() -> None:
    disk = FaultyDisk()
    segments = segments_with(NOW + 100, disk=disk)
    [(name, length)] = segments.lengths.items()

    disk.chop(segments.path(name), length - 1)
    with pytest.raises(CorruptFile, match="ends before"):
        FarSegments("/segments", disk).recover({name: length}, [])
    disk.unlink(segments.path(name))
    with pytest.raises(CorruptFile, match="is missing"):
        FarSegments("/segments", disk).recover({name: length}, [])


def test_a_flush_that_found_the_disk_full_leaves_nothing_and_can_be_run_again() -> None:
    disk = FaultyDisk()
    segments = segments_with(NOW + HOUR_MS, disk=disk)
    used, [name] = disk.used_bytes(), segments.lengths
    flush = segments.flush([timers(*range(NOW, NOW + 2 * HOUR_MS, 100_000))], TABLES, NOW)
    disk.capacity_bytes = used + 3_000

    with pytest.raises(DiskFull):
        flush.run()
    assert disk.used_bytes() == used
    assert len(disk.content(segments.path(name))) == segments.lengths[name]
    disk.capacity_bytes = None
    flush.run()
    segments.flushed(flush)

    assert len(load(segments, NOW + DAY_MS)) == 73


@pytest.mark.parametrize("cut_at", range(1, 8))
def test_a_power_cut_while_a_flush_that_found_no_space_is_cut_back_costs_nothing(
    cut_at: int,
) -> None:
    disk = FaultyDisk()
    segments = segments_with(NOW + HOUR_MS, disk=disk)
    for name in segments.lengths:
        file = disk.open(segments.path(name))
        file.fdatasync()
        file.close()
    disk.fsync_dir("/segments")
    flush = segments.flush([timers(*range(NOW, NOW + 2 * HOUR_MS, 100_000))], TABLES, NOW)
    disk.capacity_bytes = disk.used_bytes() + 3_000
    disk.cut_at = disk.operations + cut_at
    with suppress(DiskFull, PowerCut):
        flush.run()

    for seed in range(10):
        again = FarSegments("/segments", disk.after_power_cut(Random(seed)))
        again.recover(segments.lengths, [dataclasses.replace(each) for each in segments.blocks()])
        assert len(load(again, NOW + DAY_MS)) == 1


def test_every_flipped_bit_of_what_is_read_is_noticed() -> None:
    disk = FaultyDisk()
    segments = segments_with(NOW + 100, NOW + 200, disk=disk)
    [path] = [segments.path(name) for name in segments.lengths]
    [block] = segments.blocks()
    bodies_header = range(block.index_length, block.index_length + 32)
    checked = [at for at in range(block.index_length + 32 + 22) if at not in bodies_header]

    for offset in checked:
        disk.flip(path, offset)
        with pytest.raises(CorruptFile):
            segments.load(NOW + DAY_MS, MANY, MANY).run()
        disk.flip(path, offset)

    assert len(load(segments, NOW + DAY_MS)) == 2


def test_a_memtable_gives_out_what_is_due_before_a_time() -> None:
    memtable = Memtable()
    memtable.add(*timers(NOW + 1, NOW + 5, NOW + 3))

    taken = memtable.take_before(NOW + 4)

    assert [rows.due_ms.tolist() for rows, _ in taken] == [[NOW + 1, NOW + 3]]
    assert (memtable.rows, memtable.min_due_ms) == (1, NOW + 5)
    keys = np.array([key_of(1, 0), key_of(1, 1)], dtype=np.uint64)
    assert memtable.keys.find(keys).tolist() == [NOWHERE, NOW + 5]
    assert memtable.take_before(NOW + 5) == []
