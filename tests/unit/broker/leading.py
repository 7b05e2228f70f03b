"""A replica's store that leads, and how another log gets its bytes: no thread, no network."""

from __future__ import annotations

from typing import Any

from duemq_server.broker.store import recovery
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.standby import Standby
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.broker.store.tables import Tables
from duemq_server.storage.replicas import epoch
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.crash.faulty_disk import FaultyDisk

DATA = "/data"
SEGMENT_BYTES = 2_000
SETTINGS = StoreSettings(default_queues=2, timer_queues=2)
NOW_MS = 1_000_000


def opened(disk: FaultyDisk) -> Standby:
    return Standby.open(DATA, disk, SETTINGS, segment_bytes=SEGMENT_BYTES)


class Leader:
    """What it appends is committed as soon as it is settled; where, `ends` tells."""

    def __init__(self) -> None:
        self.committed = 0
        self.epoch = 0
        self.ends: dict[int, dict[str, Any]] = {}
        """The tables at ends of the log, where nothing else was appended meanwhile."""
        self.disk = FaultyDisk()
        self.lead(opened(self.disk))

    def lead(self, standby: Standby) -> None:
        """Opened on this disk."""
        self.epoch += 1
        self.log = standby.log
        self.log.committed = lambda: self.committed
        self.log.append(epoch.KIND, [epoch.encode(self.epoch, bytes(16), NOW_MS)])
        self.write()
        standby.apply(self.log.durable_position)
        self.store: Store = standby.promote().store
        self.store.ensure_timer_topic()
        self.settle()

    def again(self) -> None:
        """Its process ends; it leads the next epoch."""
        self.disk = self.disk.after_kill()
        standby = opened(self.disk)
        standby.apply(standby.log.end_position)
        self.lead(standby)

    def overtaken(self, end: int) -> None:
        """It leads again, and what nobody has from `end` on is not in its log any more."""
        self.disk = self.disk.after_kill()
        standby = opened(self.disk)
        assert standby.applied <= end
        standby.log.truncate(end)
        self.ends = {at: state for at, state in self.ends.items() if at <= end}
        standby.apply(end)
        self.lead(standby)

    def write(self) -> None:
        while self.log.write_pending():
            pass

    def settle(self) -> None:
        self.write()
        self.committed = self.log.durable_position
        self.store.durable(self.committed)
        self.ends[self.committed] = comparable(self.store.tables)

    def checkpoint(self) -> None:
        self.settle()
        save(self.store, self.store.freeze()(), self.disk)

    def retain(self, position: int) -> None:
        self.store.tables.drop_before(position)
        self.log.delete_before(position)

    @property
    def snapshot(self) -> bytes:
        payload = recovery.load_checkpoint(DATA, self.disk)
        assert payload is not None
        return payload


def save(store: Store, taken: CheckpointState, disk: FaultyDisk) -> None:
    """As the leader's process does it."""
    taken = store.tables.without_deleted(taken)
    for queue in store.all_queues():
        queue.sync()
    recovery.save_checkpoint(DATA, taken, disk)
    store.checkpointed(taken.position)
    store.tables.erase_deleted(taken)


def extend(standby: Standby, leader: ReplicaLog, end: int | None = None) -> None:
    """The other log gets whole entries up to `end`, or beyond the one that lies there."""
    end = leader.written_position if end is None else end
    while standby.log.end_position < end:
        position = standby.log.end_position
        run = bytes(leader.read_run(position, min(end - position, 1_500)))
        standby.log.extend(position, [run])
        while standby.log.write_pending():
            pass


def comparable(tables: Tables) -> dict[str, Any]:
    """What two replicas must agree on.

    Not the next id of a topic: an id may be skipped where a topic is deleted that a checkpoint
    has left out.  Not the epochs: how many are kept depends on where the log begins.
    """
    state = tables.snapshot(0, 0)
    rows = {
        "topics": state.topics["topics"],
        "offsets": state.offsets,
        "settled": state.settled,
        "groups": state.groups,
        "claims": state.timer_owners["claims"],
        "fenced": state.timer_owners["fenced"],
    }
    return {
        "queues": state.queues,
        "retries": state.retries,
        "memberships": state.memberships,
        "store_ms": state.store_ms,
        "epoch": tables.epochs.begins[-1:],
        "lanes in order": list(tables.producers._lanes),
        "lanes": sorted(
            (key, lane.epoch, lane.next_sequence, lane.window)
            for table in (tables.producers._lanes, *tables.producers._services.values())
            for key, lane in table.items()
        ),
    } | {name: sorted(found, key=repr) for name, found in rows.items()}
