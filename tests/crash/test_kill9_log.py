"""A real process on a real disk, killed with -9 again and again.  CRASH_ROUNDS sets how often."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from duemq_server.storage.disk import RealDisk
from duemq_server.storage.log import SegmentedLog

ROUNDS = int(os.environ.get("CRASH_ROUNDS", "3"))
CHILD = Path(__file__).with_name("log_child.py")
ROOT = Path(__file__).parents[2]


def run_and_kill(directory: str, mode: str, reports: int) -> int:
    """Kills the child after so many reports; answers how many entries it had acknowledged."""
    with subprocess.Popen(
        [sys.executable, str(CHILD), directory, mode],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(reports)]
        child.kill()
        lines += child.stdout.read().splitlines(keepends=True)
    whole = [int(line) for line in lines if line.endswith(b"\n")]
    return max(whole)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_process_leaves_everything_it_acknowledged(tmp_path: Path, mode: str) -> None:
    directory = str(tmp_path / "log")
    random = Random(mode)
    for _ in range(ROUNDS):
        acknowledged = run_and_kill(directory, mode, random.randint(1, 60))
        log = SegmentedLog.open(directory, RealDisk(), segment_bytes=200_000)
        bodies = [bytes(entry.body) for entry in log.recover()]
        log.close()
        assert len(bodies) >= acknowledged
        assert bodies == [b"%d " % n * (n % 300 + 1) for n in range(len(bodies))]
