"""For how long a process holds its data directory."""

import asyncio
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import duemq_server.broker.__main__ as broker
import duemq_server.timer_service.__main__ as timer_service
from duemq_server.serving.process import BeginAnew
from duemq_server.storage.dirlock import DirLock
from duemq_server.storage.errors import DirectoryLocked, DiskFailed


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
