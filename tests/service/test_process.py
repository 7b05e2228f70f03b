"""How a process begins anew, and what a signal ends: with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from pathlib import Path

import pytest

LIVES = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
from duemq_server.serving import process
from duemq_server.serving.settings import ProcessSettings
from duemq_server.storage.errors import DiskFailed

lives, how = Path(sys.argv[1]), sys.argv[2]

def signalled_between(loop, cancel_all_tasks=asyncio.runners._cancel_all_tasks):
    assert not loop.is_running()
    os.kill(os.getpid(), signal.SIGTERM)
    cancel_all_tasks(loop)

def signalled_after(task, stop):
    while not task.done():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.is_set():
        time.sleep(0.001)

async def serve(settings, stop):
    with lives.open("a") as file:
        file.write(json.dumps([os.getpid(), settings.listen, sys.argv[1:]]) + "\\n")
    if len(lives.read_text().splitlines()) > 1:
        return
    if how == "signalled":
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
    if how == "between":
        asyncio.runners._cancel_all_tasks = signalled_between
    if how == "after":
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, signalled_after, asyncio.current_task(), stop)
    if how == "fails":
        raise DiskFailed("as it happens")
    raise process.BeginAnew("its time is over")

sys.exit(process.main("lives", ProcessSettings, serve, sys.argv[3:], failures=(DiskFailed,)))
"""
# Of a service's command: a SIGTERM comes when it has imported next to nothing.
STARTS = """
import importlib, os, signal, sys

class Signalled:
    def find_spec(self, name, path=None, target=None):
        if name.endswith(".__main__"):
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Signalled())
module, _, function = sys.argv.pop(1).partition(":")
command = getattr(importlib.import_module(module), function)
sys.exit("too much was imported" if "asyncio" in sys.modules else command())
"""
SERVER = Path(__file__).parents[2] / "server" / "pyproject.toml"
COMMANDS = ("duemq-nameserver", "duemq-broker", "duemq-timer-service")
LISTEN = "127.0.0.1:12345"
WAIT_S = 60.0


async def live(lives: Path, how: str) -> tuple[int, int | None, str]:
    """A process; its id, its exit status and what it logged."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LIVES, str(lives), how, "--listen", LISTEN),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WAIT_S):
            _, logged = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.pid, process.returncode, logged.decode()


def lived(lives: Path) -> list[list[object]]:
    return [json.loads(line) for line in lives.read_text().splitlines()]


async def test_a_process_that_begins_anew_is_the_same_with_the_same_arguments(
    tmp_path: Path,
) -> None:
    lives = tmp_path / "lives"
    pid, status, logged = await live(lives, "anew")
    assert status == 0
    assert lived(lives) == [[pid, LISTEN, [str(lives), "anew", "--listen", LISTEN]]] * 2
    assert "beginning anew: its time is over" in logged


@pytest.mark.parametrize("how", ["signalled", "between", "after"])
async def test_who_is_told_to_stop_does_not_begin_anew(tmp_path: Path, how: str) -> None:
    """Also if it is while the loop is closed, which runs a few times for that."""
    lives = tmp_path / "lives"
    _, status, logged = await live(lives, how)
    assert status == 0
    assert len(lived(lives)) == 1
    assert "beginning anew" not in logged


async def test_who_fails_ends_with_a_status_and_a_line(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    _, status, logged = await live(lives, "fails")
    assert status == 1
    assert len(lived(lives)) == 1
    assert "DiskFailed: as it happens" in logged
    assert "Traceback" not in logged


OPEN_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4_096))
from duemq_server.serving import process
from duemq_server.serving.settings import ProcessSettings

async def serve(settings, stop):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))

sys.exit(process.main("opens", ProcessSettings, serve, []))
"""


async def test_a_process_may_open_as_many_files_as_it_is_ever_allowed_to() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OPEN_FILES), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(WAIT_S):
        said, _ = await process.communicate()
    assert said.split() == [b"4096", b"4096"]


async def test_a_child_of_an_embedded_cluster_that_is_told_to_stop_as_it_starts_does(
    tmp_path: Path,
) -> None:
    """And is not killed by the signal."""
    told = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nraise SystemExit(3)\n"
    (tmp_path / "told.py").write_text(told)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duemq_server.local_cluster.child", "told"),
        stdin=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    async with asyncio.timeout(WAIT_S):
        assert await process.wait() == 0


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_service_that_is_stopped_as_it_starts_ends_at_once(command: str) -> None:
    """As the first process of a container it would not hear of it without a handler."""
    scripts = tomllib.loads(SERVER.read_text())["project"]["scripts"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STARTS, scripts[command]), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert (process.returncode, said.decode()) == (0, "")
