"""The file of ids that a group had before losses."""

import asyncio
import itertools
from contextlib import suppress
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest

from duemq_server.broker.store.recovery import load_store_id, save_store_id
from duemq_server.replication import formers
from duemq_server.replication.protocol.record import Record
from duemq_server.replication.running.following.log_copy import LogCopy
from duemq_server.storage.errors import CorruptFile
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.crash.faulty_disk import FaultyDisk, PowerCut


def test_what_is_saved_is_there_after_a_power_failure() -> None:
    disk = FaultyDisk()
    disk.makedirs("/data")
    assert formers.load("/data", disk) == ()
    formers.save("/data", disk, (1, (1 << 64) - 1))
    assert formers.load("/data", disk.after_power_cut(None)) == (1, (1 << 64) - 1)


def test_damage_is_told_with_what_helps() -> None:
    disk = FaultyDisk()
    disk.makedirs("/data")
    formers.save("/data", disk, (7,))
    disk.flip("/data/formers", 30)
    with pytest.raises(CorruptFile, match="Remove /data/formers"):
        formers.load("/data", disk)


@pytest.mark.parametrize("keep", [None, *map(Random, range(8))])
def test_a_power_failure_leaves_no_new_store_id_without_the_former_one(keep: Random | None) -> None:
    """As `LogCopy.take_store_id` does it: between each two operations of the disk."""
    for cut_at in itertools.count(1):
        disk = FaultyDisk()
        disk.makedirs("/data")
        save_store_id("/data", 7, disk)
        disk.cut_at = disk.operations + cut_at
        done = False
        with suppress(PowerCut):
            asyncio.run(take(disk))
            done = True
        left = disk.after_power_cut(keep)
        found = load_store_id("/data", left), formers.load("/data", left)
        assert found in ((7, ()), (7, (7,)), (8, (7,)))
        if done:
            assert (found, cut_at > 4) == ((8, (7,)), True)
            return


async def take(disk: FaultyDisk) -> None:
    log = ReplicaLog.open("/log", FaultyDisk())
    list(log.recover())
    state = SimpleNamespace(log=log, epochs=(), committed=0, applied=0, store_id=7, known_to=800)
    state.rename = lambda store_id: save_store_id("/data", store_id, disk)
    copy = LogCopy(state)  # type: ignore[arg-type]
    copy.keep_formers = partial(formers.save, "/data", disk)
    try:
        await copy.take_store_id(Record("g", 8, frozenset("ab"), frozenset(), formers=(7,)))
    finally:
        await copy.end()
