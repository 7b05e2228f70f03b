"""Ctrl-C ends a command soon, with exit code 130 and a word on what is left."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from duemq_cli.exits import Exit
from tests.service.cli.commands import start, start_patient
from tests.service.running_cluster import Cluster, running_cluster, until

TOPIC = "orders"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0") as cluster:
        await cluster.create_topic(TOPIC)
        yield cluster


@pytest.fixture
def black_hole() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


UNBOUNDED_S = 10.0


async def interrupted(process: asyncio.subprocess.Process, times: int = 1) -> tuple[int, str, str]:
    """Its exit code and what it printed after the signal.

    The bound is loose, for a busy machine: what is without bound ends after UNBOUNDED_S at the
    earliest.
    """
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    try:
        out, err = await asyncio.wait_for(process.communicate(), UNBOUNDED_S - 0.5)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), (err or b"").decode()


def is_waiting(pid: int) -> bool:
    """Whether the command has begun to connect: its handler is in place long before."""
    with contextlib.suppress(OSError):
        return len(list(Path(f"/proc/{pid}/task").iterdir())) > 3
    return False


async def running(process: asyncio.subprocess.Process) -> None:
    """Returns once the command waits for the cluster."""
    await until(lambda: is_waiting(process.pid))


@pytest.mark.parametrize(
    ("command", "left"),
    [
        (("topic", "list"), "duemq: interrupted\n"),
        (("cluster", "show"), "duemq: interrupted\n"),
        (("topic", "create", "t"), "may have been done: look first\n"),
        (("group", "delete", "g"), "may have been done: look first\n"),
        (("send", "t", "body"), "interrupted: 0 sent, 0 not\n"),
        (("consume", "t", "--group", "g"), "group g was not told"),
        (("dlq", "resend", "g", "--all"), "interrupted: 0 sent again, 0 not\n"),
        (("message", "find", "t"), "duemq: interrupted\n"),
        (("tail", "t", "-f"), "duemq: interrupted\n"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
async def test_a_command_that_waits_for_a_cluster_ends(
    black_hole: str, command: tuple[str, ...], left: str
) -> None:
    process = await start(black_hole, *command, "--timeout", "60")
    await running(process)
    code, out, err = await interrupted(process)
    assert (code, out) == (Exit.INTERRUPTED, "")
    assert left in err
    assert "Traceback" not in err


async def test_programs_get_an_object(black_hole: str) -> None:
    process = await start(black_hole, "topic", "list", "--json", "--timeout", "60")
    await running(process)
    code, out, _ = await interrupted(process)
    assert code == Exit.INTERRUPTED
    assert json.loads(out) == {"error": {"code": "INTERRUPTED", "message": "interrupted"}}


async def test_send_says_what_was_sent(cluster: Cluster) -> None:
    process = await start(cluster.nameserver, "send", TOPIC, "-", stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"one\ntwo\n")
    for _ in range(2):
        assert await process.stdout.readline()
    code, _, err = await interrupted(process)
    assert code == Exit.INTERRUPTED
    assert "interrupted: 2 sent, 0 not\n" in err


async def test_send_does_not_wait_for_a_broker_that_is_away(cluster: Cluster) -> None:
    await cluster.silence_broker("b0")
    process = await start(cluster.nameserver, "send", TOPIC, "body")
    await running(process)
    code, _, err = await interrupted(process)
    assert code == Exit.INTERRUPTED
    assert "interrupted: 0 sent, 0 not" in err


STARTS_FOR_LONG = """
import asyncio
from duemq.consumer import push
start = push.PushConsumer.start
async def started(consumer):
    await start(consumer)
    await asyncio.sleep(600)
push.PushConsumer.start = started
"""


@pytest.mark.parametrize("changed", ["", STARTS_FOR_LONG], ids=["", "in its start"])
async def test_consume_commits_what_it_printed(cluster: Cluster, changed: str) -> None:
    """Also what comes before the main thread has heard that it has begun."""
    arguments = ("consume", TOPIC, "--group", "g", "--from", "earliest")
    await cluster.send(TOPIC, [b"one", b"two"])
    process = await start_patient(cluster.nameserver, *arguments, changed=changed)
    assert process.stdout is not None
    for _ in range(2):
        assert await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert (process.returncode, out) == (Exit.INTERRUPTED, b"")
    assert b"2 messages printed and committed, group g left" in err
    again = await start(cluster.nameserver, *arguments, "--idle-timeout", "0.5")
    assert (await again.communicate())[0] == b""


async def test_consume_ends_also_if_its_brokers_are_away(cluster: Cluster) -> None:
    await cluster.send(TOPIC, [b"a"])
    arguments = ("consume", TOPIC, "--group", "g", "--from", "earliest")
    process = await start(cluster.nameserver, *arguments)
    assert process.stdout is not None
    assert await process.stdout.readline()
    await cluster.silence_broker("b0")
    code, _, err = await interrupted(process)
    assert code == Exit.INTERRUPTED
    assert "1 messages printed" in err


STUBBORN = """
import threading
from duemq_cli import interrupts

with interrupts.bounded(interrupts.Interruption(print)):
    try:
        print("ready", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        threading.Event().wait()
"""


async def test_what_does_not_end_by_itself_is_ended() -> None:
    """All other commands here do, as their clients close; this one waits for ever."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUBBORN, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    code, out, _ = await interrupted(process)
    assert (code, out) == (Exit.INTERRUPTED, "interrupted\n")


async def test_a_second_ctrl_c_ends_at_once(black_hole: str) -> None:
    process = await start(black_hole, "topic", "list", "--timeout", "60")
    await running(process)
    code, _, _ = await interrupted(process, times=2)
    assert code == Exit.INTERRUPTED
