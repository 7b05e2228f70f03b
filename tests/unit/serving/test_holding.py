"""For how long a process holds its data directory."""

import asyncio
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import duemq_server.broker.__main__ as broker
import duemq_server.timer_service.__main__ as timer_service
from duemq.errors import InvalidArgument
from duemq_server.serving.process import BeginAnew
from duemq_server.storage.dirlock import DirLock
from duemq_server.storage.errors import DirectoryLocked, DiskFailed
from duemq_server.storage.replicas import DISK_ID_FILE


class Ending:
    """A process that ends as it is told."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def start(self) -> None:
        pass

    async def run(self, _: asyncio.Event) -> None:
        raise self._error

    async def stop(self) -> None:
        pass


@pytest.mark.parametrize("service", [broker, timer_service], ids=["broker", "timer"])
async def test_who_begins_anew_holds_it_until_then_and_who_ends_does_not(
    service: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads may write until the process executes itself."""
    locks: list[DirLock] = []

    def lock(path: str) -> DirLock:
        locks.append(DirLock(path))
        return locks[-1]

    monkeypatch.setattr(service, "DirLock", lock)
    settings = SimpleNamespace(data_dir=str(tmp_path))
    for error in (DiskFailed("as it happens"), BeginAnew("its time is over")):
        monkeypatch.setattr(service, "_process", lambda _, error=error: Ending(error))
        with pytest.raises(type(error)):
            await service.serve(settings, asyncio.Event())
    with pytest.raises(DirectoryLocked):
        DirLock(str(tmp_path))
    locks[-1].close()
    DirLock(str(tmp_path)).close()


@pytest.mark.parametrize("service", [broker, timer_service], ids=["broker", "timer"])
async def test_a_replicas_directory_is_nobodys_who_has_no_replicas(
    service: ModuleType, tmp_path: Path
) -> None:
    """What it appends in the epoch of who leads would pass for the leader's, and hide that."""
    (tmp_path / DISK_ID_FILE).write_bytes(b"")
    settings = service.Settings(
        name="q", nameservers=("127.0.0.1:1",), data_dir=str(tmp_path), listen="127.0.0.1:0"
    )
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(InvalidArgument, match="is a replica's: start it with its replica"):
        await service.serve(settings, stop)
    (tmp_path / DISK_ID_FILE).unlink()
    await service.serve(settings, stop)
