"""Damage in the log hides nothing that lies before it, and nothing in other queues.  Pure.

A read takes many frames at once.  Where one of them cannot be read, those before it are given all
the same; the next read begins there, and it is that one's error.
"""

import logging
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from duemq.errors import Corrupt
from duemq_server.broker.reading.selection import FrameRun
from duemq_server.storage.errors import StorageError

_log = logging.getLogger(__name__)

UNREADABLE = (Corrupt, StorageError, OSError, IndexError)
"""But BlockingIOError, which asks for a thread."""


class SetAsideError(Corrupt):
    """An operator has given up the entry at `position` of the log (storage/tools/set_aside.py)."""

    def __init__(self, directory: str, position: int) -> None:
        super().__init__(f"{directory}, position {position}: was damaged, and set aside")
        self.position = position


class Readable(NamedTuple):
    """Runs up to the first that is damaged, without those that were set aside."""

    runs: list[FrameRun]
    slices: list[memoryview]
    damaged: int | None = None
    """Offset of the first that is damaged."""


def readable_of(
    runs: list[FrameRun], cut: Callable[[list[FrameRun]], list[memoryview]]
) -> Readable:
    """What lies before damage is read all the same.  Raises what `cut` does, of the first run."""
    while True:
        try:
            return Readable(runs, cut(runs))
        except BlockingIOError:
            raise
        except SetAsideError as gap:
            gone = [run for run in runs if run.frame == gap.position]
            _log.warning("%s: offsets from %d on are skipped", gap, gone[0].offset)
            runs = [run for run in runs if run.frame != gap.position]
        except UNREADABLE:
            return _before_damage(runs, cut)


def _before_damage(
    runs: list[FrameRun], cut: Callable[[list[FrameRun]], list[memoryview]]
) -> Readable:
    read = Readable([], [])
    for _, frame in groupby(runs, lambda run: run.frame):
        some = list(frame)
        try:
            slices = cut(some)
        except BlockingIOError:
            raise
        except SetAsideError:
            continue
        except UNREADABLE:
            if not read.runs:
                raise
            return read._replace(damaged=some[0].offset)
        read.runs.extend(some)
        read.slices.extend(slices)
    return read
