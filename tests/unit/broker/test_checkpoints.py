"""A checkpoint, step by step, while the broker goes on: no writer thread, a disk in memory."""

import asyncio
import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from duemq_server.broker.checkpoints import Checkpoints
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.log_loop import LogLoop
from duemq_server.broker.settings import Settings
from duemq_server.broker.store import group_configs, producers
from duemq_server.broker.store.changes import group_changes, offset_changes
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.store import Store
from duemq_server.storage.errors import DiskFailed
from duemq_server.storage.indexes.index import FixedIndex
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch
from tests.unit.broker.store.test_store import DATA, NOW_MS, opened

TIMEOUT_S = 60


class Watched(Commits):
    """Says when somebody waits."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.waits = asyncio.Event()

    def call(self, position: int, callback: Callable[[], None]) -> None:
        super().call(position, callback)
        self.waits.set()


class Saving(NamedTuple):
    """A checkpoint that was taken, and now waits for the log."""

    disk: FaultyDisk
    store: Store
    commits: Watched
    log_loop: LogLoop
    checkpoints: Checkpoints
    task: asyncio.Task[None]

    def write(self) -> None:
        while self.store.log.write_pending():
            pass

    def answer(self) -> None:
        """The event loop hears how far the log is durable."""
        self.commits.waits.clear()
        position = self.store.log.durable_position
        self.commits.advance(position)
        self.store.durable(position)

    async def goes_on(self) -> None:
        """Until it is saved, or waits for more."""
        waits = asyncio.create_task(self.commits.waits.wait())
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait((self.task, waits), return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()


async def saving() -> Saving:
    """Three records of `orders`, on their way to the disk."""
    disk = FaultyDisk()
    store = opened(disk)
    for number in range(3):
        store.send(batch([b"%d" % number]), NOW_MS)
    settings = Settings(name="b1", data_dir=DATA, nameservers=("127.0.0.1:1",))
    commits, meters = Watched(store.log.durable_position), Meters(CollectorRegistry())
    log_loop = LogLoop(store, commits, meters, settings)
    checkpoints = Checkpoints(store, commits, log_loop, meters, DATA, disk, lambda *_: None)
    task = asyncio.create_task(checkpoints.save())
    made = Saving(disk, store, commits, log_loop, checkpoints, task)
    await made.goes_on()
    return made


def span(store: Store) -> tuple[int, int]:
    queue = store.queue("orders", 0)
    return queue.min_offset, queue.max_offset


async def test_a_topic_is_left_out_only_when_its_deletion_is_durable() -> None:
    it = await saving()
    it.write()
    it.store.delete_topic("orders")  # nobody has an answer yet
    it.answer()
    await it.goes_on()
    assert span(opened(it.disk.after_power_cut())) == (0, 3)
    assert span(opened(it.disk.after_kill())) == (0, 3)
    it.write()
    it.answer()
    await it.task
    for disk in (it.disk.after_power_cut(), it.disk.after_kill()):
        assert "orders" not in opened(disk).topics
    assert not any("/orders." in path for path in it.disk.paths)


async def test_what_was_purged_stays_until_the_purge_is_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FixedIndex.__init__, "__kwdefaults__", {"files": None, "file_bytes": 32})
    it = await saving()
    it.write()
    it.store.durable(it.store.log.durable_position)
    offset_changes.purge(it.store, "orders", {0: 3})
    it.answer()
    await it.task
    assert span(it.store) == (3, 3)
    assert span(opened(it.disk.after_kill())) == (0, 3)


async def test_a_full_disk_wakes_who_waits_for_room() -> None:
    """Nothing is committed then that would."""
    it = await saving()
    told: list[bool] = []
    it.store.on_report = lambda: told.append(True)
    waits = asyncio.create_task(it.commits.progress())
    await asyncio.wait((waits,), timeout=0)
    it.log_loop._on_disk_full(True)  # as the writer thread calls it
    async with asyncio.timeout(TIMEOUT_S):
        await waits
    assert told
    it.task.cancel()


async def test_a_checkpoint_begins_when_the_one_before_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is told of an older one last would take it for the newest."""
    it = await saving()
    freeze, taken = it.store.freeze, list[int]()
    second: list[asyncio.Task[None]] = []

    def noted() -> Callable[[], CheckpointState]:
        taken.append(it.store.log.end_position)
        return freeze()

    async def erase(_: CheckpointState) -> None:
        if not second:
            second.append(asyncio.create_task(it.checkpoints.save()))
            await asyncio.to_thread(lambda: None)
            assert not taken

    monkeypatch.setattr(it.store, "freeze", noted)
    monkeypatch.setattr(it.checkpoints, "_erase", erase)
    it.write()
    it.answer()
    await it.task
    await second[0]
    assert len(taken) == 1


async def test_the_rows_of_a_checkpoint_are_made_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of large tables take long: the event loop would stand still."""
    it = await saving()
    it.write()
    it.answer()
    await it.task
    group_changes.put(it.store, GroupConfig("billing"))
    it.store.send(batch([b"a"], producer_id=5), NOW_MS)
    it.write()
    it.answer()
    made_in: list[threading.Thread] = []
    for module, name in ((producers, "_pack"), (group_configs, "encode")):
        make = getattr(module, name)

        def noted(*values: object, make: Callable[..., object] = make) -> object:
            made_in.append(threading.current_thread())
            return make(*values)

        monkeypatch.setattr(module, name, noted)
    await it.checkpoints.save()
    assert len(made_in) == 2
    assert threading.current_thread() not in made_in


async def test_files_are_removed_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large topic has thousands: the event loop would stand still."""
    it = await saving()
    it.write()
    it.store.durable(it.store.log.durable_position)
    it.store.queue("orders", 0).sync()
    it.store.delete_topic("orders")
    it.answer()
    await it.goes_on()
    removed_in: list[threading.Thread] = []
    unlink = it.disk.unlink

    def noted(path: str) -> None:
        removed_in.append(threading.current_thread())
        unlink(path)

    monkeypatch.setattr(it.disk, "unlink", noted)
    it.write()
    it.answer()
    await it.task
    assert not any("/orders." in path for path in it.disk.paths)
    assert removed_in
    assert threading.current_thread() not in removed_in


async def test_files_that_cannot_go_go_after_the_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FixedIndex.__init__, "__kwdefaults__", {"files": None, "file_bytes": 32})
    it = await saving()
    it.write()
    it.answer()
    await it.task
    queue = it.store.queue("orders", 0)
    offset_changes.purge(it.store, "orders", {0: 2})
    it.write()
    it.answer()

    def unlink(path: str) -> None:
        raise DiskFailed(f"remove {path}: input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(it.disk, "unlink", unlink)
        await it.checkpoints.save()
    assert len(it.disk.listdir(queue._index.directory)) == 3
    await it.checkpoints.save()
    assert len(it.disk.listdir(queue._index.directory)) == 1
    assert span(it.store) == (2, 3)
