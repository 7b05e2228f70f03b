"""What a long job is doing, said on stderr: a line a step, with a bar on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PERIOD_S = 0.5
BAR_CELLS = 24

Tasks = Callable[[], tuple[int, int]]
"""Tasks done and tasks in all, of what runs now."""


class StepProgress:
    """Steps one after another."""

    def __init__(
        self,
        tasks: Tasks | None = None,
        stream: TextIO | None = None,
        period_s: float = PERIOD_S,
        *,
        quiet: bool = False,
    ) -> None:
        """`tasks`: asked from a thread while a step lasts, if `stream` (stderr) is a terminal.

        `quiet`: says nothing elsewhere.
        """
        self._period_s = period_s
        self._stream = stream or sys.stderr
        self._tasks = tasks if self._stream.isatty() else None
        self._quiet = quiet and self._tasks is None

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """While it lasts, `what` is being done."""
        began = time.monotonic()
        ended = threading.Event()
        self._say(f"{what} …" if self._tasks else f"{what} …\n")
        watch = threading.Thread(target=self._watch, args=(what, ended), daemon=True)
        if self._tasks:
            watch.start()
        try:
            yield
        finally:
            ended.set()
            if self._tasks:
                watch.join()
                self._say(f"\r\x1b[K{what}: {time.monotonic() - began:.1f} s\n")

    def _watch(self, what: str, ended: threading.Event) -> None:
        assert self._tasks is not None
        while not ended.wait(self._period_s):
            done, total = self._tasks()
            if total:
                self._say(f"\r\x1b[K{what} … {bar(done, total)} {done:,} of {total:,} tasks")

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._stream.write(text)
            self._stream.flush()


def bar(done: int, total: int) -> str:
    """How much of it is done, in BAR_CELLS."""
    full = BAR_CELLS * min(done, total) // total
    return "█" * full + "·" * (BAR_CELLS - full)


def tasks_of(spark: SparkSession) -> Tasks:
    """Of the stages that run now."""
    tracker = spark.sparkContext.statusTracker()

    def tasks() -> tuple[int, int]:
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        return sum(s.numCompletedTasks for s in known), sum(s.numTasks for s in known)

    return tasks
