"""Upkeep over a disk in memory and clocks that the test sets."""

import asyncio
import errno
import logging
import threading
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from duemq.protocol.names import TIMER_GROUP, TIMER_TOPIC
from duemq_server.broker import upkeep
from duemq_server.broker.clock import SETTLED_MS
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.settings import Settings
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.retention import SegmentAge
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.broker.upkeep import INTERVAL_S, RETENTION_INTERVAL_MS, Upkeep
from duemq_server.storage.errors import DiskFailed, DiskFull, TooManyFiles
from duemq_server.storage.indexes.index import FixedIndex
from tests.crash import faulty_disk
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch

NOW_MS = 1_760_000_000_000
HOUR_MS = 3_600_000
SEGMENT_BYTES = 20_000
KEEP_HOURS = 72
STORE_SETTINGS = StoreSettings(default_queues=1, timer_queues=1)


class World:
    """A store, its upkeep and its clocks."""

    def __init__(self) -> None:
        self.disk = FaultyDisk()
        self.now_ms = NOW_MS
        self.steady_ms = 0
        self.store = opened(self.disk)
        self.registry = CollectorRegistry()
        self.keep(0)

    def keep(self, retention_bytes: int) -> None:
        settings = Settings(
            name="b1",
            data_dir="/data",
            nameservers=("127.0.0.1:1",),
            free_bytes_min=1 << 20,
            retention_hours=KEEP_HOURS,
            retention_bytes=retention_bytes,
        )
        self.registry = CollectorRegistry()
        self.store.checkpointed(1 << 60)
        self.commits = Commits(self.store.log.durable_position)
        self.upkeep = Upkeep(
            self.store,
            self.commits,
            Meters(self.registry),
            settings,
            self.disk,
            lambda: self.now_ms,
            lambda: self.steady_ms,
        )

    def send(self, count: int, topic: str = "orders") -> None:
        for _ in range(count):
            self.store.send(batch([bytes(1_000)], topic=topic), self.now_ms)
        settle(self.store)

    async def passes(self, ms: int, clock_ms: int | None = None) -> None:
        self.steady_ms += ms
        self.now_ms += ms if clock_ms is None else clock_ms
        self.commits.advance(self.store.log.durable_position)
        self.upkeep.look()
        await self.upkeep.retain_if_due()

    def count(self, name: str) -> float:
        return self.registry.get_sample_value(f"duemq_broker_{name}_total") or 0.0


def opened(disk: FaultyDisk) -> Store:
    return recovery.open_store("/data", disk, STORE_SETTINGS, segment_bytes=SEGMENT_BYTES).store


def settle(store: Store) -> None:
    while store.log.write_pending():
        pass
    store.durable(store.log.durable_position)


@pytest.fixture
def world() -> World:
    return World()


async def test_what_a_full_disk_hid_is_shown_when_there_is_space_though_nothing_more_comes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.send(1)
    with monkeypatch.context() as full:

        def no_space(*_: object) -> None:
            raise DiskFull("no space left")

        full.setattr(Queue, "append", no_space)
        world.send(1)
        await world.passes(1_000)
    queue = world.store.queue("orders", 0)
    assert queue.max_offset == 1
    await world.passes(1_000)
    assert queue.max_offset == 2


async def test_segments_go_when_they_are_too_old(world: World) -> None:
    world.send(100)
    await world.passes(HOUR_MS)
    segments = len(world.store.log.segments)
    world.send(40)
    await world.passes((KEEP_HOURS - 1) * HOUR_MS)
    assert world.store.log.start_position == 0
    await world.passes(HOUR_MS)
    assert world.store.log.start_position > 0
    assert len(world.store.log.segments) < segments
    assert world.count("clock_jumps") == 0


async def test_a_clock_that_jumps_removes_nothing_by_itself(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.send(100)
    year = 365 * 24 * HOUR_MS
    await world.passes(RETENTION_INTERVAL_MS, year)
    assert world.count("clock_jumps") == 1
    assert "the clock jumped by" in caplog.text
    world.send(5)
    await world.passes(RETENTION_INTERVAL_MS, RETENTION_INTERVAL_MS - year)
    world.send(100)
    await world.passes(2 * SETTLED_MS)
    assert world.store.log.start_position == 0
    # What was stored while it was ahead does not stay for ever either.
    await world.passes(KEEP_HOURS * HOUR_MS)
    assert len(world.store.log.segments) == 1
    assert world.store.tables.store_ms < world.now_ms


async def test_a_clock_that_stays_ahead_is_believed_in_the_end(world: World) -> None:
    world.send(100)
    await world.passes(RETENTION_INTERVAL_MS, 100 * HOUR_MS)
    await world.passes(SETTLED_MS - 1)
    assert world.store.log.start_position == 0
    await world.passes(RETENTION_INTERVAL_MS)
    assert world.store.log.start_position > 0


async def test_entries_that_are_no_frames_hold_no_segment_back(world: World) -> None:
    world.keep(retention_bytes=3 * SEGMENT_BYTES)
    world.send(30)
    for number in range(2_000):
        key = GroupQueue("g", "orders", 0)
        offset_changes.put(world.store, "g", [(key, GroupOffset(number % 30, 5))])
    settle(world.store)
    world.send(100)
    await world.passes(RETENTION_INTERVAL_MS)
    kept = world.store.log.end_position - world.store.log.start_position
    assert kept <= 4 * SEGMENT_BYTES


async def test_the_size_kept_is_of_the_log_and_of_what_lies_beside_it(world: World) -> None:
    """Of messages this small consume queues and keys need more than the log."""
    world.keep(retention_bytes=4 * SEGMENT_BYTES)
    for _ in range(30):
        world.store.send(batch([b"a"] * 100), world.now_ms)
    settle(world.store)
    log, queue = world.store.log, world.store.queue("orders", 0)
    kept = log.end_position - log.start_position
    assert kept < 4 * SEGMENT_BYTES < kept + 40 * 3_000
    await world.passes(RETENTION_INTERVAL_MS)
    kept = log.end_position - log.start_position + 40 * (3_000 - queue.min_offset)
    assert kept >= 4 * SEGMENT_BYTES
    first = log.segments[1]
    without = log.end_position - first.start + 40 * (3_000 - queue.first_from(first.start))
    assert without < 4 * SEGMENT_BYTES


async def test_size_is_looked_at_with_each_segment(world: World) -> None:
    """Much may come within a minute."""
    world.keep(retention_bytes=3 * SEGMENT_BYTES)
    for _ in range(5):
        world.send(40)
        await world.passes(int(INTERVAL_S * 1_000))
        assert len(world.store.log.segments) <= 5


async def test_it_is_said_that_retention_waits_for_the_timer_service(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one the disk gets full, and nobody would know why."""
    caplog.set_level(logging.INFO)
    world.keep(retention_bytes=2 * SEGMENT_BYTES)
    world.send(80)
    world.store.checkpointed(0)
    await world.passes(RETENTION_INTERVAL_MS)
    assert not caplog.text  # it waits for a checkpoint
    world.store.checkpointed(1 << 60)
    world.store.send(batch([b"later"], delays_ms=HOUR_MS.to_bytes(8, "little")), world.now_ms)
    for _ in range(3):
        world.send(40)
        await world.passes(RETENTION_INTERVAL_MS)
    held = world.store.log.start_position
    assert world.store.log.end_position - held > 4 * SEGMENT_BYTES
    assert caplog.text.count("`duemq timer owners`") == 1
    taken = GroupQueue(TIMER_GROUP, TIMER_TOPIC, 0), GroupOffset(1, 0)
    offset_changes.put(world.store, TIMER_GROUP, [taken])
    for _ in range(2):
        await world.passes(RETENTION_INTERVAL_MS)
    assert world.store.log.start_position > held
    assert caplog.text.count("no longer") == 1


def unreadable(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    pread: Callable[..., memoryview] = faulty_disk.FaultyFile.pread

    def failing(self: faulty_disk.FaultyFile, *args: object, **kwargs: object) -> memoryview:
        if part in self.path:
            raise OSError(errno.EIO, "Input/output error", self.path)
        return pread(self, *args, **kwargs)

    monkeypatch.setattr(faulty_disk.FaultyFile, "pread", failing)


def with_a_quiet_topic(world: World) -> None:
    """3 messages, and 100 of another topic behind them; then the broker was started anew."""
    world.send(3, topic="quiet")
    world.send(100)
    for queue in world.store.all_queues():
        queue.sync()
    recovery.save_checkpoint("/data", world.store.freeze()(), world.disk)
    world.store.close()
    world.store = opened(world.disk)
    world.keep(retention_bytes=SEGMENT_BYTES)


async def test_a_consume_queue_that_cannot_be_read_holds_up_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_a_quiet_topic(world)
    unreadable(monkeypatch, "/quiet.")
    for _ in range(3):
        await world.passes(RETENTION_INTERVAL_MS)
        world.send(40)
    assert world.store.queue("orders", 0).min_offset > 0
    assert world.store.log.start_position > 0
    errors = [line for line in caplog.records if line.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "quiet/0" in errors[0].getMessage()
    assert world.count("upkeep_errors") > 1
    assert opened(world.disk).queue("orders", 0).max_offset == 220  # nor does a start need it


async def test_retention_waits_for_a_queue_that_cannot_be_opened_while_too_many_files_are_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone on without, its begin would be CORRUPT until more goes of the log."""
    with_a_quiet_topic(world)

    def too_many(queue: Queue, position: int) -> int:
        raise TooManyFiles(f"open a file of {queue.key}")

    with monkeypatch.context() as patched:
        patched.setattr(Queue, "first_from", too_many)
        await world.passes(RETENTION_INTERVAL_MS)
    assert world.store.log.start_position == 0
    await world.passes(RETENTION_INTERVAL_MS)
    assert world.store.log.start_position > 0
    quiet = world.store.queue("quiet", 0)
    assert quiet.min_offset == quiet.max_offset == 3


async def test_a_segment_that_cannot_be_read_holds_up_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.send(100)
    broken = world.store.log.segments[1]
    unreadable(monkeypatch, broken.path)
    await world.passes(RETENTION_INTERVAL_MS)
    await world.passes(KEEP_HOURS * HOUR_MS)
    await world.passes(SETTLED_MS)
    assert world.store.log.start_position > broken.start
    assert broken.path in caplog.text
    assert world.count("upkeep_errors") > 0


@pytest.mark.parametrize("quiet_bytes", [0, (10 << 30) - (1 << 20)])
async def test_space_is_looked_at_more_often_the_less_there_is(
    world: World, monkeypatch: pytest.MonkeyPatch, quiet_bytes: int
) -> None:
    """Else a fast sender has the last byte between two looks, and nothing can be deleted.

    Also one that begins suddenly, when there is not much.
    """
    left = (10 << 30) - quiet_bytes
    monkeypatch.setattr(world.disk, "free_bytes", lambda _: (1 << 20) + left)
    for _ in range(3):
        await world.passes(int(world.upkeep.pause_s * 1_000))
    rate_ms = 200 << 10
    looks = 0
    while not world.store.read_only:
        pause_ms = int(world.upkeep.pause_s * 1_000)
        left -= rate_ms * pause_ms
        await world.passes(pause_ms)
        looks += 1
    assert left >= -rate_ms * 100
    assert looks < 40
    assert world.upkeep.pause_s == INTERVAL_S


async def test_what_is_left_of_the_disk_is_shown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for left in (5 << 20, -7):
        monkeypatch.setattr(world.disk, "free_bytes", lambda _, left=left: (1 << 20) + left)
        await world.passes(60_000)
        assert world.registry.get_sample_value("duemq_broker_disk_left_bytes") == left
        assert world.store.read_only == (left < 0)


async def test_space_is_looked_at_while_retention_takes_its_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast sender goes on meanwhile."""
    free, retaining, short = [1 << 20], asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(world.disk, "free_bytes", lambda _: free[-1])
    monkeypatch.setattr(upkeep, "INTERVAL_S_MIN", 0.0)
    world.store.on_report = short.set

    async def forever() -> int:
        free.append(0)
        retaining.set()
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(world.upkeep, "retain", forever)
    running = asyncio.create_task(world.upkeep.run())
    async with asyncio.timeout(60):
        await retaining.wait()
        await short.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert world.store.read_only


async def test_where_queues_begin_is_looked_up_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 0.5 ms a queue, and there may be ten thousand."""
    world.keep(retention_bytes=6 * SEGMENT_BYTES)
    world.send(70)
    asked: list[tuple[str, int]] = []
    first_from = Queue.first_from

    def noted(self: Queue, position: int) -> int:
        asked.append((self.topic, position))
        return first_from(self, position)

    monkeypatch.setattr(Queue, "first_from", noted)
    for _ in range(3):
        await world.passes(RETENTION_INTERVAL_MS)
    world.send(1, topic="new")
    await world.passes(RETENTION_INTERVAL_MS)
    assert "new" in {topic for topic, _ in asked}
    assert len(set(asked)) == len(asked)
    world.send(100, topic="new")
    await world.passes(RETENTION_INTERVAL_MS)
    start = world.store.log.start_position
    assert world.store.log.end_position - start < 6 * SEGMENT_BYTES
    assert start > 0


async def test_a_clock_that_jumps_while_ages_are_read_removes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.send(100)
    await world.passes(2 * SETTLED_MS)
    ages = world.upkeep._ages

    def jumps() -> list[SegmentAge]:
        world.now_ms += 365 * 24 * HOUR_MS
        return ages()

    monkeypatch.setattr(world.upkeep, "_ages", jumps)
    await world.passes(RETENTION_INTERVAL_MS)
    assert world.store.log.start_position == 0


async def test_idle_producers_are_forgotten_by_a_clock_that_nobody_sets(world: World) -> None:
    world.store.send(batch([b"a"], producer_id=1), world.now_ms)
    await world.passes(1_000, STORE_SETTINGS.lane_idle_ms * 50)
    assert len(world.store.producers) == 1
    await world.passes(1_000, -STORE_SETTINGS.lane_idle_ms * 50)
    await world.passes(STORE_SETTINGS.lane_idle_ms - 2_000, 0)
    assert len(world.store.producers) == 1
    await world.passes(1, 0)
    assert len(world.store.producers) == 0


async def test_what_retention_reads_and_removes_it_does_in_another_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old entries are cold, and a file takes its time to go: the event loop would stand still."""
    monkeypatch.setattr(FixedIndex.__init__, "__kwdefaults__", {"files": None, "file_bytes": 32})
    world = World()
    world.send(100)
    inside: set[tuple[str, bool]] = set()

    def noted(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def call(self: object, *given: object, **named: object) -> object:
            inside.add((name, threading.current_thread() is threading.main_thread()))
            return real(self, *given, **named)

        monkeypatch.setattr(owner, name, call)

    noted(Queue, "first_from")
    noted(FixedIndex, "_remove")
    queue = world.store.queue("orders", 0)
    queue.sync()
    world.keep(SEGMENT_BYTES)
    await world.passes(RETENTION_INTERVAL_MS)
    assert inside == {("first_from", False), ("_remove", False)}
    assert queue.min_offset > 0


async def test_files_that_cannot_go_hold_nothing_else_up_and_go_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedIndex.__init__, "__kwdefaults__", {"files": None, "file_bytes": 32})
    world = World()
    world.send(100)
    queue = world.store.queue("orders", 0)
    queue.sync()
    world.keep(SEGMENT_BYTES)

    def stays(*_: object) -> None:
        raise DiskFailed("remove a file: input/output error")

    def dropped_files() -> int:
        """Of one the last entry may be there yet."""
        begins = map(int, world.disk.listdir(queue._index.directory))
        return sum(begin < queue.min_offset for begin in begins) - 1

    with monkeypatch.context() as patch:
        patch.setattr(FixedIndex, "_remove", stays)
        await world.passes(RETENTION_INTERVAL_MS)
    assert world.count("upkeep_errors") == 1
    assert queue.min_offset > 0
    assert dropped_files() > 0
    assert world.store.log.start_position > 0
    world.send(40)
    await world.passes(RETENTION_INTERVAL_MS)
    assert world.count("upkeep_errors") == 1
    assert dropped_files() <= 0
    assert world.disk.listdir(queue._index.directory)


async def test_a_purge_that_is_faster_leaves_its_queue_for_the_next_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.send(100)
    world.keep(SEGMENT_BYTES)

    def gone(*_: object) -> int:
        raise IndexError("entry 3 is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Queue, "first_from", gone)
        await world.passes(RETENTION_INTERVAL_MS)
    queue = world.store.queue("orders", 0)
    assert (queue.min_offset, world.count("upkeep_errors")) == (0, 0)
    world.send(40)
    await world.passes(RETENTION_INTERVAL_MS)
    assert queue.min_offset > 0
