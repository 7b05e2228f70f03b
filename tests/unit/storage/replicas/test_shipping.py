"""Two logs on a real disk, each with its writer's threads: what one writes the other gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from duemq_server.storage.disk import RealDisk
from duemq_server.storage.errors import LogFull
from duemq_server.storage.replicas.replica_log import ReplicaLog
from duemq_server.storage.writer import LogWriter

ENTRIES = 3_000
SEGMENT_BYTES = 64 * 1024
RUN_BYTES = 8 * 1024
WAIT_S = 60


class Replica:
    """A log and its writer; `durable` is what the writer told."""

    def __init__(self, path: Path) -> None:
        self.log = ReplicaLog.open(str(path), RealDisk(), segment_bytes=SEGMENT_BYTES)
        assert list(self.log.recover()) == []
        self.durable = 0
        self.changed = threading.Condition()
        self.failed: list[BaseException] = []
        self.writer = LogWriter(self.log, self._on_durable, self.failed.append)

    def _on_durable(self, position: int) -> None:
        with self.changed:
            assert position >= self.durable
            self.durable = position
            self.changed.notify_all()

    def wait_until_durable(self, position: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.durable >= position, WAIT_S)


@contextmanager
def running(path: Path) -> Iterator[Replica]:
    replica = Replica(path)
    replica.writer.start()
    try:
        yield replica
    finally:
        replica.writer.stop()
        replica.log.close()
        assert replica.failed == []


def ship(leader: Replica, follower: Replica, end: int, written: threading.Semaphore) -> None:
    while follower.log.end_position < end:
        position = follower.log.end_position
        if position >= leader.log.written_position:
            assert written.acquire(timeout=WAIT_S)
            continue
        run = leader.log.read_run(position, RUN_BYTES)
        try:
            follower.log.extend(position, [run])
        except LogFull:
            follower.wait_until_durable(position)


@pytest.mark.parametrize("size", [40, 1_500])
def test_what_is_written_is_shipped_while_it_is_synced(tmp_path: Path, size: int) -> None:
    written = threading.Semaphore(0)
    with running(tmp_path / "a") as leader, running(tmp_path / "b") as follower:
        leader.log.on_written = lambda _: written.release()
        leader.log.committed = lambda: min(leader.durable, follower.durable)
        end = ENTRIES * (32 + (size + 7) // 8 * 8)
        shipper = threading.Thread(target=ship, args=[leader, follower, end, written])
        shipper.start()
        for number in range(ENTRIES):
            leader.log.append(1, [number.to_bytes(4, "little") * (size // 4)])
        shipper.join(WAIT_S)
        assert not shipper.is_alive()
        leader.wait_until_durable(end)
        follower.wait_until_durable(end)
        logs = [leader.log, follower.log]
        entries = [
            [(e.position, e.synced_position, bytes(e.body)) for e in log.entries(0)] for log in logs
        ]
        assert entries[0] == entries[1]
        assert len(entries[0]) == ENTRIES
        # Nothing was claimed that the follower had not: it never was behind.
        assert not follower.log.catching_up
