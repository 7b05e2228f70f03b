"""flush_mode=async, with the real writer and the real checkpoints, on a disk that forgets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from duemq_server.broker import log_loop as log_loops
from duemq_server.broker.checkpoints import Checkpoints
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.log_loop import LogLoop
from duemq_server.broker.settings import Settings
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.errors import DiskFailed
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch

DATA = "/data"
STORE_SETTINGS = StoreSettings(default_queues=1, timer_queues=1)
KEY = GroupQueue("g", "orders", 0)


class Running(NamedTuple):
    store: Store
    commits: Commits
    checkpoints: Checkpoints


@asynccontextmanager
async def running(disk: FaultyDisk) -> AsyncIterator[Running]:
    store = recovery.open_store(DATA, disk, STORE_SETTINGS, unsynced_boot=b"first").store
    settings = Settings(name="b1", data_dir=DATA, nameservers=("127.0.0.1:1",))
    commits, meters = Commits(store.log.durable_position), Meters(CollectorRegistry())
    log_loop = LogLoop(store, commits, meters, settings, unsynced=True)
    checkpoints = Checkpoints(
        store,
        commits,
        log_loop,
        meters,
        DATA,
        disk,
        lambda queues, state: None,
    )
    log_loop.start()
    try:
        yield Running(store, commits, checkpoints)
    finally:
        await log_loop.stop()


async def send(broker: Running, first: int, count: int) -> None:
    for number in range(first, first + count):
        sent = batch([b"%d" % number], producer_id=7, sequence=number)
        await broker.commits.wait(broker.store.send(sent, 1_000).settled)


async def cut_short(keep: Random | None) -> FaultyDisk:
    """50 messages are synced, 50 acknowledged and consumed, then a checkpoint is saved, then 10
    more are acknowledged and the power goes."""
    disk = FaultyDisk()
    async with running(disk) as broker:
        await send(broker, 0, 50)
        await asyncio.to_thread(broker.store.log.sync)
        await send(broker, 50, 50)
        await broker.commits.wait(
            offset_changes.put(broker.store, "g", [(KEY, GroupOffset(100, 5))])
        )
        assert broker.store.queue("orders", 0).max_offset == 100
        await broker.checkpoints.save()
        await send(broker, 100, 10)
        return disk.after_power_cut(keep)


@pytest.mark.parametrize("seed", [None, *range(15)])
async def test_a_checkpoint_is_never_ahead_of_the_log(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_loops, "ASYNC_SYNC_INTERVAL_S", 3_600)
    disk = await cut_short(None if seed is None else Random(seed))
    store = recovery.open_store(DATA, disk, STORE_SETTINGS, unsynced_boot=b"second").store
    queue = store.queue("orders", 0)
    assert queue.records_from(0) >= 100
    progress = store.offsets.find(KEY)
    assert progress is not None
    assert progress.offset == 100 <= queue.max_offset


async def test_files_of_a_deleted_topic_that_cannot_be_removed_hold_no_checkpoint_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    async with running(disk) as broker:
        await send(broker, 0, 5)
        await broker.checkpoints.save()
        await broker.commits.wait(broker.store.delete_topic("orders"))

        def failing(path: str) -> None:
            raise DiskFailed(f"remove {path}: input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(disk, "unlink", failing)
            await broker.checkpoints.save()
            await broker.checkpoints.save()
        assert "files of deleted topics stay for now" in caplog.text
        assert any("consumequeue/orders" in path for path in disk.paths)
        await broker.checkpoints.save()
        assert not any("consumequeue/orders" in path for path in disk.paths)
