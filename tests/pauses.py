"""Threads stand still at random calls, as on a machine with more of them than processors.

    make pauses                                            # the tests of services, any seed
    make pauses SEED=7 CALLS=150 FILES=tests/service/test_broker_pull.py

`tests/stalls.py` finds what does not bear a long stand; this finds what hangs on who is first: two
threads of a process that run against each other, a thread and the test that looks for what it did.
Each thread of the test's process stops about every CALLS calls, for up to PAUSE seconds.  Threads
that begin while modules are imported go on, as do the processes that a test starts.
"""

import os
import random
import sys
import threading
from collections.abc import Callable, Generator
from time import sleep
from types import FrameType
from typing import Any

import pytest

from tests.stalls import with_section

SEED = os.environ.get("PAUSE_SEED", "1")
CALLS = int(os.environ.get("PAUSE_CALLS", "200"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0.02"))
SECTION = "pauses"

Profile = Callable[[FrameType, str, Any], None]


class Pauses:
    """Those of the test that runs."""

    def __init__(self) -> None:
        self.test: str | None = None
        """Nobody stands still between tests."""
        self.paused = 0

    def of_thread(self) -> Profile:
        """For `sys.setprofile`, in the thread that is to stand still."""
        chosen = random.Random(f"{SEED} {self.test} {threading.current_thread().name}")
        left = chosen.randint(1, 2 * CALLS)

        def called(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal left
            if event != "call" or self.test is None:
                return
            left -= 1
            if left <= 0:
                left = chosen.randint(1, 2 * CALLS)
                self.paused += 1
                sleep(chosen.uniform(0, PAUSE_S))

        return called

    def begin(self, frame: FrameType, event: str, arg: Any) -> None:
        """For `threading.setprofile`: what a thread calls first."""
        sys.setprofile(self.of_thread())

    def pytest_report_header(self) -> str:
        return f"pauses: up to {PAUSE_S:g} s every {CALLS} calls or so, PAUSE_SEED={SEED}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        self.test, self.paused = item.nodeid, 0
        sys.setprofile(self.of_thread())
        try:
            yield
        finally:
            sys.setprofile(None)
            self.test = None
            if self.paused:
                item.add_report_section("call", SECTION, f"{self.paused}, PAUSE_SEED={SEED}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        paused, of = with_section(terminalreporter, SECTION)
        terminalreporter.write_line(
            f"threads of {paused} of {of} tests stood still, PAUSE_SEED={SEED}"
        )


def pytest_configure(config: pytest.Config) -> None:
    pauses = Pauses()
    threading.setprofile(pauses.begin)
    config.pluginmanager.register(pauses)
