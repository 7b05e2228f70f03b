"""Damage in the log, and what lies before it in the same read."""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from duemq.errors import Corrupt, Unavailable
from duemq.v1 import message_pb2
from duemq_server.broker.filtering.sql_filter import Fields, SqlFilter
from duemq_server.broker.reading import filtered_read, reader
from duemq_server.broker.reading.repeats import due_of
from duemq_server.broker.store import recovery
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.errors import DiskFull
from duemq_server.storage.indexes import consume_queue
from duemq_server.storage.tools import set_aside
from tests.crash.faulty_disk import FaultyDisk, FaultyFile
from tests.unit.broker.batches import batch
from tests.unit.broker.store.test_store import save

NOW_MS = 1_000_000
SEGMENT = "/data/commitlog/" + "0" * 20
FRAMES, DAMAGED, ASIDE = 12, 7, 3


class Read(NamedTuple):
    bodies: list[bytes]
    next_offset: int


class World:
    """Frames of two records each: (n, n)."""

    def __init__(self) -> None:
        self.disk = FaultyDisk()
        settings = StoreSettings(default_queues=1, timer_queues=1)
        self.store: Store = recovery.open_store("/data", self.disk, settings).store
        for number in range(FRAMES):
            self.store.send(batch([b"%d" % number] * 2), NOW_MS)
        while self.store.log.write_pending():
            pass
        self.store.durable(self.store.log.durable_position)
        self.queue: Queue = self.store.queue("orders", 0)

    def flip(self, frame: int) -> int:
        position = self.queue.frame_at(2 * frame)
        self.disk.flip(SEGMENT, position + 40)
        return position

    def pulled(self, offset: int, wanted: frozenset[int] | None = None) -> Read:
        read = reader.read_records(self.store.log, self.queue, offset, 100, 1 << 20, wanted)
        assert sum(map(len, read.slices)) == read.size
        return self._read(read.slices, read.records, read.next_offset)

    def tagged(self, offset: int) -> Read:
        return self.pulled(offset, frozenset([0]))

    def matching(self, offset: int) -> Read:
        read = filtered_read.read_matching(
            self.store.log,
            self.queue,
            offset,
            100,
            1 << 20,
            SqlFilter("TAGS IS NULL"),
            fields_of,
        )
        return self._read(read.slices, read.records, read.next_offset)

    def _read(self, slices: list[memoryview], records: int, next_offset: int) -> Read:
        found = message_pb2.RecordBatch.FromString(b"".join(slices)).records
        assert len(found) == records
        return Read([each.body for each in found], next_offset)


def fields_of(record: bytes) -> Fields:
    return message_pb2.Record.FromString(record)


READS = [World.pulled, World.tagged, World.matching]


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("read", READS)
def test_what_lies_before_a_damaged_frame_is_read(
    world: World, read: Callable[[World, int], Read]
) -> None:
    set_aside.set_aside("/data/commitlog", world.flip(ASIDE), world.disk)
    world.flip(DAMAGED)
    before = [b"%d" % n for n in range(DAMAGED) for _ in range(2) if n != ASIDE]
    assert read(world, 0) == Read(before, 2 * DAMAGED)
    with pytest.raises(Corrupt, match="set-aside"):
        read(world, 2 * DAMAGED)
    rest = read(world, 2 * DAMAGED + 2)
    assert rest.bodies == [b"%d" % n for n in range(DAMAGED + 1, FRAMES) for _ in range(2)]


def test_timers_before_a_damaged_frame_are_fetched(world: World) -> None:
    world.flip(DAMAGED)
    frames = reader.read_frames(world.store.log, world.queue, 0, 1 << 20)
    assert (len(frames.slices), frames.next_offset) == (DAMAGED, 2 * DAMAGED)
    with pytest.raises(Corrupt):
        reader.read_frames(world.store.log, world.queue, 2 * DAMAGED, 1 << 20)


def test_sectors_that_cannot_be_read_hide_nothing_before_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = world.queue.frame_at(2 * DAMAGED)
    pread = FaultyFile.pread

    def failing(self: FaultyFile, length: int, offset: int, nowait: bool = False) -> memoryview:
        if self.path == SEGMENT and offset <= bad < offset + length:
            raise OSError(5, "Input/output error", self.path)
        return pread(self, length, offset, nowait)

    monkeypatch.setattr(FaultyFile, "pread", failing)
    assert world.pulled(0).next_offset == 2 * DAMAGED
    offset = 0
    while offset < 2 * DAMAGED:
        offset = reader.read_frames(world.store.log, world.queue, offset, 1 << 20).next_offset
    with pytest.raises(OSError, match="Input/output"):
        reader.read_frames(world.store.log, world.queue, offset, 1 << 20)


def test_too_many_open_files_are_no_damage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends a record back, or repeats a batch, tries again later."""
    stored = world.store.send(
        batch([b"x"], producer_id=7, delays_ms=struct.pack("<q", 5_000)), NOW_MS
    ).stored
    while world.store.log.write_pending():
        pass

    def refused(self: FaultyDisk, path: str, *, create: bool = False) -> FaultyFile:
        raise DiskFull(f"open {path}: Too many open files")

    world.store.log._files.close()
    monkeypatch.setattr(FaultyDisk, "open", refused)
    [answer] = reader.read_each(world.store.log, [(world.queue, 0)], 1 << 20)
    assert isinstance(answer, Unavailable)
    with pytest.raises(Unavailable):
        due_of(world.store.log, stored)


LIES = range(8 * 16)  # bits of an entry's position, size and frame_back


class Indexed(NamedTuple):
    world: World
    path: str

    def lies(self) -> Iterator[None]:
        """While each bit of the middle record's entry is another one."""
        for bit in LIES:
            at = 2 * DAMAGED * consume_queue.ENTRY_BYTES + bit // 8
            self.world.disk.flip(self.path, at, bit % 8)
            yield
            self.world.disk.flip(self.path, at, bit % 8)


@pytest.fixture
def indexed(world: World) -> Indexed:
    """Opened anew: its consume queue is read from the disk."""
    save(world.store, world.disk)
    world.store = recovery.open_store("/data", world.disk, world.store.settings).store
    world.queue = world.store.queue("orders", 0)
    [path] = [path for path in world.disk.paths if "consumequeue/orders" in path]
    return Indexed(world, path)


@pytest.mark.parametrize("read", READS)
def test_a_consume_queue_that_lies_makes_no_message_pass_for_another(
    indexed: Indexed, read: Callable[[World, int], Read]
) -> None:
    whole = read(indexed.world, 0)
    assert len(whole.bodies) == 2 * FRAMES
    for _ in indexed.lies():
        before = read(indexed.world, 0)
        assert before == Read(whole.bodies[: 2 * DAMAGED], 2 * DAMAGED)
        with pytest.raises((Corrupt, IndexError)) as told:
            read(indexed.world, 2 * DAMAGED)
        # The log is sound: cutting it would lose what only it has.
        assert "cut" not in str(told.value)
        assert isinstance(told.value, IndexError) or "check /data`" in str(told.value)
    assert read(indexed.world, 0) == whole


def test_a_consume_queue_that_lies_gives_no_other_timers(indexed: Indexed) -> None:
    log, queue = indexed.world.store.log, indexed.world.queue
    whole = [bytes(each) for each in reader.read_frames(log, queue, 0, 1 << 20).slices]
    for _ in indexed.lies():
        frames = reader.read_frames(log, queue, 0, 1 << 20)
        assert [bytes(each) for each in frames.slices] == whole[: frames.next_offset // 2]
        assert frames.next_offset >= 2 * DAMAGED


def test_a_consume_queue_that_lies_sends_no_other_message_back(indexed: Indexed) -> None:
    places = [(indexed.world.queue, 2 * DAMAGED + n) for n in (0, 2)]
    [_, other] = reader.read_each(indexed.world.store.log, places, 1 << 20)
    for _ in indexed.lies():
        [damaged, *sound] = reader.read_each(indexed.world.store.log, places, 1 << 20)
        assert isinstance(damaged, Corrupt)
        assert sound in ([], [other])  # the first may seem to be as large as all that is read
