"""Ctrl-C while the job is being loaded, which takes a second or two: it ends, and says nothing.

An exception would come out of whatever is being imported just then.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C waits: for who becomes the job within, until that one says `begin`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin() -> None:
    """From here on Ctrl-C ends the process at once; nothing is there to be put away.

    Not where it is ignored, as in the background of a shell.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def over() -> None:
    """From here on it is an ordinary KeyboardInterrupt, if it was `begin`'s."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(130)
