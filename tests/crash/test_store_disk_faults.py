"""Every single call of the broker's store to its disk fails once: full, or broken.

A full disk refuses, and the same is tried again; after anything else the process ends, and another
one starts, on what the operating system kept or, if the power fails, too, on what was synced.
Whatever was acknowledged is there in the end, once, in order; and no start is refused for good.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from duemq.errors import DuemqError
from duemq.protocol.names import TIMER_TOPIC
from duemq_server.broker.reading import reader
from duemq_server.broker.records.batch import IncomingBatch
from duemq_server.broker.store import recovery
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.tables import begins_at, free
from duemq_server.storage.errors import DiskFull, StorageError
from tests.crash.failing_disk import FailingDisk, Faults, calls_of
from tests.crash.test_store_power_cut import DATA, NOW_MS, PRODUCER, SEGMENT_BYTES, opened, settle
from tests.unit.broker.batches import batch

TRIES_MAX = 3


class Life:
    """A broker's store that is started again when it ends, and its only producer."""

    def __init__(self, faults: Faults, *, power: bool) -> None:
        self.random = Random(faults.at)
        self.power = power
        self.disk = FailingDisk(faults)
        self.sent: dict[tuple[str, bool], list[IncomingBatch]] = {}
        self.store = self.started()

    def started(self) -> Store:
        for _ in range(TRIES_MAX):
            try:
                store = opened(self.disk)
                settle(store)
                return store
            except (StorageError, OSError):
                self.end()
        raise AssertionError("it does not start")

    def end(self) -> None:
        """The process does, and perhaps the power is gone."""
        disk = self.disk
        self.disk = disk.after_power_cut(self.random) if self.power else disk.after_kill()

    def restart(self) -> None:
        self.end()
        self.store = self.started()

    def do(self, work: Callable[[], None]) -> None:
        """Until it succeeds."""
        for _ in range(TRIES_MAX):
            try:
                return work()
            except (DiskFull, DuemqError):
                self.store.durable(self.store.log.durable_position)
            except (StorageError, OSError):
                self.restart()
        raise AssertionError("it does not succeed")

    def send(self, topic: str, *sizes: int, timed: bool = False) -> None:
        """Batch by batch, each until it is acknowledged."""
        due = {"delays_ms": struct.pack("<q", 5_000)} if timed else {}
        for size in sizes:
            sent = self.sent.setdefault((topic, timed), [])
            bodies = [b"%d" % len(sent) + bytes(size)] * (1 if timed else 2)
            made = batch(bodies, topic=topic, producer_id=PRODUCER, sequence=len(sent), **due)
            sent.append(made)

            def acknowledged(made: IncomingBatch = made) -> None:
                self.store.send(made, NOW_MS)
                settle(self.store)

            self.do(acknowledged)

    def delete(self, topic: str) -> None:
        def deleted() -> None:
            if topic in self.store.topics:
                self.store.delete_topic(topic)
            settle(self.store)

        del self.sent[topic, False]
        self.do(deleted)

    def save(self) -> None:
        """What the checkpoint loop does."""

        def saved() -> None:
            state = self.store.freeze()()
            settle(self.store)
            self.store.check_shown()
            state = self.store.tables.without_deleted(state)
            for queue in self.store.all_queues():
                queue.sync()
            recovery.save_checkpoint(DATA, state, self.disk)
            self.store.checkpointed(state.position)
            self.store.tables.erase_deleted(state)

        self.do(saved)

    def retain(self) -> None:
        """What upkeep does: all goes that another start does not need.

        A queue that cannot be read begins where it did, until more goes.
        """
        starts = [each.start for each in self.store.log.segments]
        position = max(start for start in starts if start <= self.store.next_start)

        def retained() -> None:
            begins, _ = begins_at(self.store.all_queues(), position)
            self.store.tables.forget_before(begins)
            free(begins)
            self.store.log.delete_before(position)

        self.do(retained)

    def found(self, topic: str) -> bytes:
        """All records of a queue."""
        [queue] = self.store.queues_of(topic)
        assert queue.max_offset == queue.next_offset
        read = reader.read_records(self.store.log, queue, queue.min_offset, 1 << 16, 8 << 20)
        assert read.next_offset == queue.max_offset
        return b"".join(read.slices)

    def check(self, *, retained: bool) -> None:
        """What was acknowledged is there once, or its end; sent again it is a repeat."""
        assert "bills" not in self.store.topics
        for (topic, timed), sent in self.sent.items():
            records = b"".join(each.records for each in sent)
            found = self.found(TIMER_TOPIC if timed else topic)
            assert records.endswith(found) if retained else found == records
            assert all(self.store.send(each, NOW_MS).duplicate for each in sent)


def live(faults: Faults, *, power: bool) -> None:
    life = Life(faults, power=power)
    life.send("orders", 10, 600, 31)
    life.save()
    life.send("bills", 900)
    life.send("orders", 700, 5, timed=True)
    life.save()
    life.delete("bills")
    life.save()
    life.send("orders", 1_500, 2_500)
    life.restart()
    life.send("orders", 7)
    life.send("other", 4_500)
    life.do(lambda: life.check(retained=False))
    life.save()
    life.retain()
    life.restart()
    faults.over = True
    life.send("other", SEGMENT_BYTES)
    life.save()
    life.retain()
    for _ in range(2):
        life.restart()
        life.check(retained=True)


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("kind", ["full", "broken"])
@pytest.mark.parametrize("at", calls_of(partial(live, power=True)))
def test_a_call_that_fails_loses_and_repeats_nothing(kind: str, at: int, power: bool) -> None:
    faults = Faults(kind, at)
    live(faults, power=power)
    assert faults.calls >= at
