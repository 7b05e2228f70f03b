"""Runs commands against a cluster in this process."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
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


async def start(nameserver: str, *arguments: str, **pipes: Any) -> asyncio.subprocess.Process:
    """As a process of its own."""
    return await _start(("-m", "duemq_cli"), nameserver, arguments, pipes)


PATIENT = "from duemq_cli import interrupts, main; interrupts.GRACE_S = 600.0\n"


async def start_patient(
    nameserver: str, *arguments: str, changed: str = "", **pipes: Any
) -> asyncio.subprocess.Process:
    """Ctrl-C leaves it all the time that it needs, whatever else the machine does.

    `changed`: a program that changes something in it first.
    """
    program = f"{PATIENT}{changed}\nmain()"
    return await _start(("-c", program), nameserver, arguments, pipes)


async def _start(
    program: Sequence[str], nameserver: str, arguments: Sequence[str], pipes: Mapping[str, Any]
) -> asyncio.subprocess.Process:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *program, "--nameserver", nameserver, *arguments),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        **pipes,
    )
