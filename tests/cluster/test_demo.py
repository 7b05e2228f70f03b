"""The demo, faster: its books balance, and a dropped delivery is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# The day takes 3 s instead of a minute.
SPEED = "22780"


@pytest.mark.parametrize(
    ("flags", "code"), [((), 0), pytest.param(("--inject-loss",), 1, marks=pytest.mark.long)]
)
def test_the_demo_tells_by_its_exit_code(tmp_path: Path, flags: tuple[str, ...], code: int) -> None:
    command = [sys.executable, "-m", "duemq_server.demo", "--speed", SPEED, "--no-report"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "a demo"), *flags],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "accepted 1,004 = cancelled 121 + delivered" in done.stdout
    assert ("lost for group board" in done.stdout) == bool(code)
    assert "23:00  " in done.stdout  # the day, drawn before it begins
    assert "LGA goes on" in done.stdout
    assert "fired 883 + cancelled 121 + replaced " in done.stdout
