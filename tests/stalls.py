"""Each test's event loop stands still once, as it does in a process that gets no processor.

    make stalls                                                  # the tests of services, any seed
    make stalls SEED=7 STALL=6 FILES=tests/service/test_lease.py

So a race that a busy machine shows once in ten runs shows in one.  When it stands still say the
seed and the test's name, in turns of the loop; what happens between them no seed decides, so it
repeats a run roughly.  `make ci` does it to a few files, with one seed.

Only one event loop stands still: threads of the process go on, so do other loops (a blocking
client's) and the processes that a test starts; `tests/cluster/disturbance.py` stops those.
Fixtures are left alone, and a test that takes fewer turns: the last line counts the others.
"""

import asyncio
import itertools
import math
import os
import random
from collections.abc import Generator
from time import sleep

import pytest

SEED = os.environ.get("STALL_SEED", "1")
STALL_S = float(os.environ.get("STALL_S", "2.3"))
# A short test takes some turns, one with a cluster thousands: each power of ten is as likely.
TURNS_MIN, TURNS_MAX = 5, 1_000
SECTION = "stall"


class Turns:
    """Those of a test's loops, together; at one of them it stands still."""

    def __init__(self, test: str) -> None:
        chosen = random.Random(f"{SEED} {test}")
        self.at = int(math.exp(chosen.uniform(math.log(TURNS_MIN), math.log(TURNS_MAX))))
        self.stalled = False
        # Loops may run in several threads, and a count is never read twice.
        self._count = itertools.count()

    def turn(self) -> None:
        if next(self._count) == self.at:
            self.stalled = True
            sleep(STALL_S)


class Stalls:
    """The turns of the test that runs."""

    def __init__(self) -> None:
        self._turns: Turns | None = None

    def pytest_report_header(self) -> str:
        return f"stalls: of {STALL_S:g} s, STALL_SEED={SEED}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        self._turns = turns = Turns(item.nodeid)
        try:
            yield
        finally:
            self._turns = None
            if turns.stalled:
                said = f"stood still for {STALL_S:g} s at turn {turns.at}, STALL_SEED={SEED}"
                item.add_report_section("call", SECTION, said)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        stalled, of = with_section(terminalreporter, SECTION)
        terminalreporter.write_line(
            f"{stalled} of {of} tests stood still for {STALL_S:g} s, STALL_SEED={SEED}"
        )

    def patch(self) -> None:
        run_once = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

        def turn(loop: asyncio.BaseEventLoop) -> None:
            if self._turns is not None:
                self._turns.turn()
            run_once(loop)

        asyncio.BaseEventLoop._run_once = turn  # type: ignore[attr-defined]


def with_section(terminalreporter: pytest.TerminalReporter, section: str) -> tuple[int, int]:
    """How many tests have it in their reports, and of how many."""
    calls = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if report.when == "call"
    ]
    return sum(any(section in name for name, _ in each.sections) for each in calls), len(calls)


def pytest_configure(config: pytest.Config) -> None:
    stalls = Stalls()
    stalls.patch()
    config.pluginmanager.register(stalls)
