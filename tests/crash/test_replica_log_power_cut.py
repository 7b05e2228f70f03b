"""The power goes at every single operation of a log that follows another one."""

from __future__ import annotations

from random import Random

import pytest

from duemq_server.storage.disk import Disk
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.crash.faulty_disk import FaultyDisk, PowerCut

DIRECTORY = "/log"
SEGMENT_BYTES = 2048
SEEDS = range(8)
SIZES = [10, 700, 33, 480, 900, 5, 3000, 60, 60, 400, 1]
KEPT = 5  # entries that both histories have
SNAPSHOT_END = 1 << 20


def history(bodies: list[bytes]) -> list[bytes]:
    """A leader's entries as they lie in its log; each was committed before the next was written."""
    log = opened(FaultyDisk())
    for body in bodies:
        log.append(1, [body])
        log.write_pending()
    return [bytes(log.read(e.position, e.end - e.position)) for e in log.entries(0)]


def opened(disk: Disk) -> ReplicaLog:
    log = ReplicaLog.open(DIRECTORY, disk, segment_bytes=SEGMENT_BYTES)
    for _ in log.recover():
        pass
    return log


def content(log: ReplicaLog) -> bytes:
    entries = log.entries(log.start_position)
    return b"".join(bytes(log.read(e.position, e.end - e.position)) for e in entries)


BODIES = [Random(number).randbytes(size) for number, size in enumerate(SIZES)]
OLD = history(BODIES)
NEW = history([*BODIES[:KEPT], *(body[::-1] + b"new" for body in BODIES[KEPT:])])
COMMON = b"".join(OLD[:KEPT])
assert NEW[:KEPT] == OLD[:KEPT]


class Follower:
    """Follows one leader, then another; `durable` is what it said to have on its disk."""

    def __init__(self, disk: Disk) -> None:
        self.log = opened(disk)
        self.durable = b""
        self.histories = [b"".join(OLD)]

    def run(self) -> None:
        self.take(OLD[:2], group=1)  # in sync
        self.take(OLD[2:], group=4)  # far behind: the entries claim more than is here
        self.log.caught_up()
        self.durable = COMMON
        self.histories.append(b"".join(NEW))
        self.log.truncate(len(COMMON))
        self.take(NEW[KEPT:], group=2)

    def take(self, entries: list[bytes], group: int) -> None:
        for first in range(0, len(entries), group):
            for entry in entries[first : first + group]:
                self.log.extend(self.log.end_position, [entry])
            while self.log.write_group():
                pass
            self.log.sync()
            self.durable = content(self.log)


def operations() -> int:
    disk = FaultyDisk()
    Follower(disk).run()
    return disk.operations


def kept_states(disk: FaultyDisk) -> list[FaultyDisk]:
    cuts = [disk.after_power_cut(Random(seed)) for seed in SEEDS]
    return [disk.after_kill(), disk.after_power_cut(None), *cuts]


@pytest.mark.parametrize("cut_at", range(4, operations() + 1))
def test_a_power_cut_keeps_what_a_follower_said_to_have(cut_at: int) -> None:
    disk = FaultyDisk(cut_at=cut_at)
    follower = Follower(disk)
    with pytest.raises(PowerCut):
        follower.run()
    for after in kept_states(disk):
        log = opened(after)
        there = content(log)
        assert any(known.startswith(there) for known in follower.histories)
        assert there.startswith(follower.durable)
        assert log.durable_position == log.end_position == len(there)
        if b"".join(NEW).startswith(there):  # it goes on where it stopped
            log.extend(len(there), [b"".join(NEW)[len(there) :]] if there != b"".join(NEW) else [])
            log.write_pending()
            assert content(opened(after.after_power_cut(None))) == b"".join(NEW)


def moved(disk: Disk) -> ReplicaLog:
    log = opened(disk)
    log.extend(0, OLD)
    while log.write_pending():
        pass
    log.begin_at(SNAPSHOT_END)
    return log


def operations_to_move() -> int:
    disk = FaultyDisk()
    moved(disk)
    return disk.operations


@pytest.mark.parametrize("cut_at", range(1, operations_to_move() + 1))
def test_a_power_cut_while_a_log_begins_elsewhere_leaves_one_that_opens(cut_at: int) -> None:
    disk = FaultyDisk(cut_at=cut_at)
    with pytest.raises(PowerCut):
        moved(disk)
    for after in kept_states(disk):
        log = opened(after)
        assert log.start_position in (0, SNAPSHOT_END)
        assert b"".join(OLD).startswith(content(log))
        log.begin_at(SNAPSHOT_END)
        log.append(1, [b"and on it goes"])
        log.write_pending()
        again = opened(after.after_power_cut(None))
        assert [bytes(e.body) for e in again.entries(SNAPSHOT_END)] == [b"and on it goes"]
