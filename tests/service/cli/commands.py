"""Runs commands against a cluster in this process."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from duemq_cli.app import cli


async def run(nameserver: str, *arguments: str, stdin: str | bytes | None = None) -> Result:
    """In a thread: the cluster has the event loop."""
    command = ["--nameserver", nameserver, *arguments]
    return await asyncio.to_thread(CliRunner().invoke, cli, command, input=stdin)


def rows(result: Result) -> list[dict[str, Any]]:
    """The objects that a command printed."""
    return [json.loads(line) for line in result.stdout.splitlines()]


# Where the cluster is slow it is there all the same.
CONNECTS = "from duemq_cli import interrupts, main, session; session.CONNECT_TIMEOUT_S_MIN = 60.0"


async def start(
    nameserver: str, *arguments: str, changed: str = "", **pipes: Any
) -> asyncio.subprocess.Process:
    """As a process of its own.  `changed`: a program that changes something in it first."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    program = "\n".join((CONNECTS, changed, "main()"))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, "--nameserver", nameserver, *arguments),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        **pipes,
    )


async def start_patient(
    nameserver: str, *arguments: str, changed: str = "", **pipes: Any
) -> asyncio.subprocess.Process:
    """Ctrl-C leaves it all the time that it needs, whatever else the machine does."""
    patient = f"interrupts.GRACE_S = 600.0\n{changed}"
    return await start(nameserver, *arguments, changed=patient, **pipes)
