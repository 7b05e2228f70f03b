from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from duemq_server.storage import writer as writer_module
from duemq_server.storage.errors import DiskFailed, DiskFull
from duemq_server.storage.log import Group, SegmentedLog
from duemq_server.storage.writer import Commit, LogWriter
from tests.crash.faulty_disk import FaultyDisk

WAIT_SECONDS = 60


class Events:
    """Collects what the writer reports, and waits for it."""

    def __init__(self) -> None:
        self.durable: queue.Queue[int] = queue.Queue()
        self.fatal: queue.Queue[BaseException] = queue.Queue()
        self.full: queue.Queue[bool] = queue.Queue()
        self.commits: list[Commit] = []

    def wait_durable(self, position: int) -> list[int]:
        seen = [self.durable.get(timeout=WAIT_SECONDS)]
        while seen[-1] < position:
            seen.append(self.durable.get(timeout=WAIT_SECONDS))
        return seen


@contextmanager
def running(
    disk: FaultyDisk, sync_interval_s: float | None = None
) -> Iterator[tuple[SegmentedLog, Events]]:
    log = SegmentedLog.open("/log", disk, segment_bytes=4096)
    assert list(log.recover()) == []
    events = Events()
    log_writer = LogWriter(
        log,
        events.durable.put,
        events.fatal.put,
        sync_interval_s=sync_interval_s,
        on_disk_full=events.full.put,
        on_commit=events.commits.append,
    )
    log_writer.start()
    try:
        yield log, events
    finally:
        log_writer.stop()


def bodies(disk: FaultyDisk) -> list[bytes]:
    return [bytes(e.body) for e in SegmentedLog.open("/log", disk).recover()]


def test_entries_are_acknowledged_once_they_are_durable() -> None:
    disk = FaultyDisk()
    with running(disk) as (log, events):
        for i in range(200):
            _, end = log.append(1, [b"%d" % i])
            if i % 50 == 0:
                assert events.wait_durable(end)[-1] >= end
                assert log.durable_position >= end
        events.wait_durable(log.end_position)
        assert sum(commit.group.entries for commit in events.commits) == 200
    assert bodies(disk.after_power_cut(None)) == [b"%d" % i for i in range(200)]


def test_what_gathers_during_a_sync_needs_two_more_at_most() -> None:
    disk = FaultyDisk()
    syncing, go_on = threading.Event(), threading.Event()
    with running(disk) as (log, events):
        block_next_sync(log, syncing, go_on)
        log.append(1, [b"first"])
        assert syncing.wait(WAIT_SECONDS)
        for i in range(10):
            log.append(1, [b"%d" % i])
        go_on.set()
        events.wait_durable(log.end_position)
        entries = [commit.group.entries for commit in events.commits]
        assert sum(entries) == 11
        assert len(entries) <= 3


def test_the_next_group_is_written_while_one_is_synced() -> None:
    disk = FaultyDisk()
    syncing, go_on = threading.Event(), threading.Event()
    with running(disk) as (log, events):
        block_next_sync(log, syncing, go_on)
        log.append(1, [b"first"])
        assert syncing.wait(WAIT_SECONDS)
        written = note_writes(log)
        _, end = log.append(1, [b"second"])
        assert written.get(timeout=WAIT_SECONDS) == end
        assert log.durable_position == 0
        assert events.durable.empty()
        go_on.set()
        events.wait_durable(end)
    assert bodies(disk.after_power_cut(None)) == [b"first", b"second"]


def note_writes(log: SegmentedLog) -> queue.Queue[int]:
    """Where each group ended that is written from now on."""
    ends: queue.Queue[int] = queue.Queue()
    write_group: Callable[[], Group | None] = log.write_group

    def noted() -> Group | None:
        group = write_group()
        if group is not None:
            ends.put(group.end_position)
        return group

    log.write_group = noted  # type: ignore[method-assign]
    return ends


def test_nothing_is_acknowledged_by_a_sync_after_a_failed_one() -> None:
    """The kernel drops pages that it could not write: the next sync would succeed without them."""
    disk = FaultyDisk()
    syncing, go_on = threading.Event(), threading.Event()
    with running(disk) as (log, events):
        block_next_sync(log, syncing, go_on)
        log.append(1, [b"lost"])
        assert syncing.wait(WAIT_SECONDS)
        written = note_writes(log)
        log.append(1, [b"written meanwhile"])
        written.get(timeout=WAIT_SECONDS)
        disk.fail_sync_at = disk.syncs + 1
        go_on.set()
        assert isinstance(events.fatal.get(timeout=WAIT_SECONDS), DiskFailed)
    assert events.durable.empty()
    assert events.fatal.empty()


class Handover:
    """A log's lock of syncs; who waits for it has it the moment that a failure lets it go."""

    def __init__(self, waiting: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._waiting = waiting
        self._handed_over = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._lock.release()
        if kind is DiskFailed and not self._handed_over:
            self._handed_over = True
            waiting = threading.Thread(target=self._waiting)
            waiting.start()
            waiting.join(WAIT_SECONDS)


def test_nothing_is_acknowledged_by_a_sync_after_a_failed_one_at_a_roll() -> None:
    disk = FaultyDisk()
    log = SegmentedLog.open("/log", disk, segment_bytes=4096)
    assert list(log.recover()) == []
    log.append(1, [bytes(3000)])
    log.write_group()
    log.append(1, [bytes(3000)])
    disk.fail_sync_at = disk.syncs + 1  # once, as the kernel tells it
    failures: list[DiskFailed] = []

    def other_thread() -> None:
        try:
            log.sync()
        except DiskFailed as error:
            failures.append(error)

    log._sync_lock = Handover(other_thread)  # type: ignore[assignment]
    with pytest.raises(DiskFailed):
        log.write_group()
    assert (len(failures), log.durable_position) == (1, 0)


def test_a_mark_that_finds_no_space_holds_no_answer_back() -> None:
    disk = FaultyDisk()
    with running(disk) as (log, events):
        log.append(1, [b"first"])
        events.wait_durable(log.end_position)

        def full(_position: int) -> None:
            raise DiskFull("no space left")

        log._mark.store = full  # type: ignore[method-assign]
        for body in (b"second", bytes(4096)):  # the other one rolls
            _, end = log.append(1, [body])
            assert events.wait_durable(end)[-1] == end
        assert not log.disk_full
    assert bodies(disk.after_power_cut(None)) == [b"first", b"second", bytes(4096)]


def test_many_writers_and_rolls_keep_every_entry_in_order() -> None:
    disk = FaultyDisk()
    with running(disk) as (log, events):  # segments of 4 KiB
        ends = [log.append(1, [b"%d " % i * 100])[1] for i in range(400)]
        seen = events.wait_durable(ends[-1])
    assert seen == sorted(seen)
    assert bodies(disk.after_power_cut(None)) == [b"%d " % i * 100 for i in range(400)]


def block_next_sync(log: SegmentedLog, syncing: threading.Event, go_on: threading.Event) -> None:
    sync: Callable[[], int] = log.sync

    def blocked() -> int:
        syncing.set()
        assert go_on.wait(WAIT_SECONDS)
        return sync()

    log.sync = blocked  # type: ignore[method-assign]


def test_a_stop_writes_and_syncs_all_that_waits() -> None:
    disk = FaultyDisk()
    with running(disk) as (log, _):
        for i in range(50):
            log.append(1, [b"%d" % i])
    assert bodies(disk.after_power_cut(None)) == [b"%d" % i for i in range(50)]


def test_entries_appended_before_the_start_are_written() -> None:
    disk = FaultyDisk()
    log = SegmentedLog.open("/log", disk)
    assert list(log.recover()) == []
    log.append(1, [b"early"])
    events = Events()
    log_writer = LogWriter(log, events.durable.put, events.fatal.put)
    log_writer.start()
    events.wait_durable(log.end_position)
    log_writer.stop()


def test_without_sync_entries_are_acknowledged_when_written_and_synced_at_the_stop() -> None:
    disk = FaultyDisk()
    with running(disk, sync_interval_s=3600) as (log, events):
        log.append(1, [b"first"])
        events.wait_durable(log.end_position)
        log.append(1, [b"second"])
        events.wait_durable(log.end_position)
        assert log.durable_position < log.written_position
        assert bodies(disk.after_kill()) == [b"first", b"second"]
    assert bodies(disk.after_power_cut(None)) == [b"first", b"second"]


def test_without_sync_the_interval_bounds_what_a_power_cut_takes() -> None:
    disk = FaultyDisk()
    synced = threading.Event()
    with running(disk, sync_interval_s=0.001) as (log, events):
        sync: Callable[[], int] = log.sync

        def noticed() -> int:
            position = sync()
            if position == log.end_position:
                synced.set()
            return position

        log.sync = noticed  # type: ignore[method-assign]
        log.append(1, [b"first"])
        events.wait_durable(log.end_position)
        assert synced.wait(WAIT_SECONDS)
        assert bodies(disk.after_power_cut(None)) == [b"first"]


def test_without_sync_many_bytes_are_synced_before_the_interval_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "UNSYNCED_BYTES", 1000)
    disk = FaultyDisk()
    with running(disk, sync_interval_s=3600) as (log, events):
        for _ in range(50):
            events.wait_durable(log.append(1, [bytes(100)])[1])
            assert log.written_position - log.durable_position < 1000


@pytest.mark.parametrize("sync_interval_s", [None, 3600])
def test_a_stop_on_a_full_disk_syncs_what_was_written(sync_interval_s: float | None) -> None:
    disk = FaultyDisk()
    with running(disk, sync_interval_s) as (log, events):
        log.append(1, [b"first"])
        events.wait_durable(log.end_position)
        log.append(1, [b"acknowledged"])
        events.wait_durable(log.end_position)
        disk.capacity_bytes = disk.used_bytes()
        log.append(1, [bytes(64_000)])
        assert events.full.get(timeout=WAIT_SECONDS) is True
    assert bodies(disk.after_power_cut(None)) == [b"first", b"acknowledged"]


def test_without_sync_the_interval_holds_while_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "RETRY_SECONDS", 0.001)
    disk = FaultyDisk()
    with running(disk, sync_interval_s=0.001) as (log, events):
        synced = threading.Event()
        monkeypatch.setattr(log, "sync", lambda: None)  # none comes before the disk is full
        _, end = log.append(1, [b"acknowledged"])
        events.wait_durable(end)
        disk.capacity_bytes = 0
        log.append(1, [bytes(9_000)])
        assert events.full.get(timeout=WAIT_SECONDS)

        def sync() -> int:
            position = SegmentedLog.sync(log)
            synced.set()
            return position

        monkeypatch.setattr(log, "sync", sync)
        assert synced.wait(WAIT_SECONDS)
        assert log.durable_position == end
        assert bodies(disk.after_power_cut(None)) == [b"acknowledged"]


def test_a_full_disk_is_told_and_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "RETRY_SECONDS", 0.001)
    disk = FaultyDisk()
    with running(disk) as (log, events):
        disk.capacity_bytes = disk.used_bytes()
        log.append(1, [b"held"])
        assert events.full.get(timeout=WAIT_SECONDS) is True
        with pytest.raises(DiskFull):
            log.append(1, [b"refused"])
        assert events.durable.empty()
        disk.capacity_bytes = None
        assert events.full.get(timeout=WAIT_SECONDS) is False
        events.wait_durable(log.end_position)
        log.append(1, [b"accepted"])
        events.wait_durable(log.end_position)
    assert bodies(disk) == [b"held", b"accepted"]
    assert events.fatal.empty()


def test_a_stop_does_not_wait_for_a_full_disk() -> None:
    disk = FaultyDisk()
    with running(disk) as (log, events):
        disk.capacity_bytes = disk.used_bytes()
        log.append(1, [b"never acknowledged"])
        assert events.full.get(timeout=WAIT_SECONDS) is True
    assert events.durable.empty()
    assert events.fatal.empty()


def test_a_failed_sync_is_fatal_and_acknowledges_nothing() -> None:
    disk = FaultyDisk()
    with running(disk) as (log, events):
        disk.fail_sync_at = disk.syncs + 1
        log.append(1, [b"lost"])
        assert isinstance(events.fatal.get(timeout=WAIT_SECONDS), DiskFailed)
        with pytest.raises(DiskFailed):
            log.append(1, [b"refused"])
    assert events.durable.empty()
    assert events.fatal.empty()
