"""A timer shard with two replicas, each with a disk of its own: the same world as of one.

One leads, and is the shard of the world; the other's log gets the leader's bytes.  While both are
in the set, what both have durably is committed, and when the leader dies either may lead next.  One
whose disk was emptied is not in it, before it has got all again: by a snapshot, and the log.
"""

from __future__ import annotations

from contextlib import suppress

from duemq_server.replication.protocol.epochs import common_end
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.storage.replicas import epoch
from duemq_server.storage.replicas.replica_log import ReplicaLog
from duemq_server.timer_service.disk.bounded_log import BoundedLog
from duemq_server.timer_service.disk.data_directory import DataDirectory
from duemq_server.timer_service.disk.snapshots import snapshot
from duemq_server.timer_service.disk.snapshots.arriving import Arriving
from duemq_server.timer_service.disk.standby import Standby
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import SourceId
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.property.keyed_model import SHARD
from tests.property.timer_world import BROKER, DATA, OTHER, World

CHUNK = 1 << 20


def snapshot_of(
    disk: FaultyDisk, part_bytes: int = 1_000, version: int = snapshot.VERSION
) -> bytes:
    """As a leader sends it."""
    leaving = snapshot.take(DATA, disk, version)
    assert leaving is not None
    parts = [*iter(lambda: leaving.read(part_bytes), b"")]
    leaving.close()
    assert max(map(len, parts)) <= part_bytes
    return b"".join(parts)


def arrived(standby: Standby, data: bytes, part_bytes: int = 1_000) -> Arriving:
    """A snapshot that came, and is not installed."""
    arriving = standby.receive()
    for at in range(0, len(data), part_bytes):
        arriving.write(data[at : at + part_bytes])
    return arriving


class ReplicatedWorld(World):
    """See the module."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.standby_disk = FaultyDisk()
        self.epoch = 0
        self.takeovers = 0
        self.snapshots = 0
        self.alone = False
        """The other replica is not in the set."""
        self._committed = 0
        self._is_full = False
        super().__init__(seed, limits)

    # -- the group

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def log(self) -> ReplicaLog:
        log = self.directory.log
        assert isinstance(log, ReplicaLog)
        return log

    def _open(self) -> DataDirectory:
        """Some replica takes over; the other follows it."""
        while True:
            try:
                return self._elect()
            except PowerCut:
                self.disk = self._alive(self.disk)
                self.standby_disk = self._alive(self.standby_disk)

    def _alive(self, disk: FaultyDisk) -> FaultyDisk:
        return disk.after_power_cut(self.random) if disk.off else disk

    def _elect(self) -> DataDirectory:
        if not self.alone and self.random.random() < 0.5:
            self.disk, self.standby_disk = self.standby_disk, self.disk
        leader = self._replica(self.disk)
        assert leader.log.end_position >= self._committed
        self.standby = self._replica(self.standby_disk)
        self._join(leader.store_id)
        epochs = leader.epochs
        self.epoch += 1
        start, _ = leader.log.append(epoch.KIND, [epoch.encode(self.epoch, bytes(16), self.now_ms)])
        while leader.log.write_pending():
            pass
        self._epochs = (*epochs, (self.epoch, start))
        self._follow(leader.log)
        self._ship(leader.log)
        self._hear(leader.log)
        assert self._committed == leader.log.end_position
        if self._is_full:
            self.disk.capacity_bytes = 0
        self.directory = leader.promote()
        leader.log.committed = lambda: self._committed
        self.scheduler.log = BoundedLog(leader.log, self.limits.uncommitted_max)
        self.scheduler.keyed.source = SourceId(self.directory.producer_id, SHARD)
        self.takeovers += 1
        self._route()
        for name in sorted({BROKER, OTHER} - self._away):
            self.scheduler.dispatcher.connected(name)
        return self.directory

    def _replica(self, disk: FaultyDisk) -> Standby:
        for path in (DATA, f"{DATA}/log", f"{DATA}/segments"):
            disk.makedirs(path)
        standby = Standby.open(DATA, disk, self.limits, clock=lambda: self.now_ms)
        assert not standby.lost
        assert standby.applied <= standby.committed <= self._committed
        return standby

    def _join(self, store_id: int) -> None:
        if self.standby.store_id != store_id:
            assert not self.standby.log.end_position
            self.standby.rename(store_id)

    def _follow(self, leader: ReplicaLog) -> None:
        mine = self.standby.log
        ends = mine.end_position, leader.end_position
        common = common_end(self.standby.epochs, ends[0], self._epochs, ends[1])
        assert self.alone or common >= self._committed
        assert common >= self.standby.committed
        if common < max(leader.start_position, mine.start_position):
            self._install(leader)
        elif common < mine.end_position:
            mine.truncate(common)
        first = max(mine.start_position, leader.start_position)
        common = min(common, mine.end_position)
        assert [*mine.entries(first, common)] == [*leader.entries(first, common)]

    def _install(self, leader: ReplicaLog) -> None:
        """The leader has cut off what the other lacks."""
        assert self.alone
        start = leader.start_position
        data = snapshot_of(self.disk)
        self.snapshots += 1
        arrived(self.standby, data, self.random.choice((1_000, CHUNK))).install(start)
        assert self.standby.log.end_position == start

    def _ship(self, leader: ReplicaLog, bytes_max: int = CHUNK) -> None:
        """What the leader has written comes to the other log, in chunks, as far as it does."""
        mine = self.standby.log
        if mine.end_position < leader.start_position:
            self._install(leader)
        while bytes_max > 0 and mine.end_position < leader.written_position:
            run = leader.read_run(mine.end_position, min(bytes_max, CHUNK))
            mine.extend(mine.end_position, [run])
            bytes_max -= len(run)
            mine.write_group()
        self.standby.drop_before(leader.start_position)

    def _hear(self, leader: ReplicaLog) -> None:
        """The other syncs, and answers: more is committed."""
        mine = self.standby.log
        mine.write_pending()
        if mine.durable_position >= self._committed:
            mine.caught_up()
        if self.alone and mine.durable_position >= max(self._committed, self._epochs[-1][1] + 1):
            self.alone = False
        known = leader.durable_position
        if not self.alone:
            known = min(known, mine.durable_position)
        assert known >= self._committed
        self._committed = known

    # -- what happens

    def ship(self, bytes_max: int) -> None:
        self._ship(self.log, bytes_max)

    def hear(self) -> None:
        self._hear(self.log)
        bounded = self.scheduler.log
        assert isinstance(bounded, BoundedLog)
        bounded.advance(self._committed)
        self._settle()

    def sync(self) -> None:
        """All that was appended becomes committed, unless the disk is full."""
        super().sync()
        self.ship(CHUNK)
        self.hear()

    def sync_here(self) -> None:
        """The leader alone syncs."""
        super().sync()

    def standby_pass(self, share: float) -> None:
        """The follower hears that some of what is committed is, and may look at it."""
        known = self.standby.applied
        self.standby.apply(known + int(share * (self._committed - known)))

    def standby_pass_with_little_space(self, left_bytes: int) -> None:
        """What a pass leaves the log can take, unless it is a checkpoint's."""
        disk, before = self.standby_disk, self.standby.known_to
        disk.capacity_bytes = disk.used_bytes() + left_bytes
        try:
            self.standby.apply(self._committed)
            self.standby.pass_now()
        except DiskFull:
            assert disk.free_bytes("/") >= left_bytes
            assert self.standby.known_to == before
        finally:
            disk.capacity_bytes = None

    def standby_checkpoint(self) -> None:
        self.standby.apply(self._committed)
        self.standby.pass_now()
        if self.alone:
            return
        assert self.standby.known_to == self.standby.applied == self._committed

    # -- what goes wrong

    def _start(self, disk: FaultyDisk) -> None:
        self.disk = self._alive(disk)
        self.standby_disk = self._alive(self.standby_disk.after_kill())
        self._open()

    def power_cut(self) -> None:
        """Of one machine or both."""
        if not (self.disk.off or self.standby_disk.off):
            self.random.choice((self.disk, self.standby_disk)).off = True
        if self.disk.off or self.random.random() < 0.3:
            if self.random.random() < 0.3:
                self.standby_disk.off = True
            self.restart(self.disk.after_power_cut(self.random))
        else:
            self.standby_restarts(self.standby_disk.after_power_cut(self.random))

    def standby_restarts(self, disk: FaultyDisk | None = None) -> None:
        """The follower's process is gone; another follows the same leader."""
        disk = disk or self.standby_disk.after_kill()
        while True:
            self.standby_disk = self._alive(disk)
            try:
                self.standby = self._replica(self.standby_disk)
                self._join(self.directory.producer_id)
                self._follow(self.log)
                break
            except PowerCut:
                disk = self.standby_disk

    def broker_forgets(self) -> None:
        """Its data are those of a while ago: the last batch of each lane that was answered."""
        self.sync()
        with suppress(LogFull, DiskFull):
            self.scheduler.flush_acks()
        self.sync()
        lanes = list(self.scheduler.dispatcher.lanes())
        acked = not any(lane.unacked for lane in lanes) and not self.scheduler._acks
        if not acked or self.committed < self.log.end_position:
            return
        for lane in lanes:
            key = lane.id, lane.epoch
            if self.broker.lanes.get(key):
                self.broker.lanes[key] -= 1

    def kill_on_a_full_disk(self) -> None:
        """Who leads next has its log, and no space for more."""
        self._is_full = True
        try:
            self.kill()
        finally:
            self._is_full = False

    def empty_standbys_disk(self) -> None:
        """A new disk in its place; the leader goes on alone, until that has got all."""
        self.alone = True
        self.standby_restarts(FaultyDisk())
        self.hear()

    def cut_standbys_power_in(self, operations: int) -> None:
        self.standby_disk.cut_at = self.standby_disk.operations + operations

    def heal(self) -> None:
        super().heal()
        self.standby_disk.cut_at = None
