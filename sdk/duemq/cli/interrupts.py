"""Ctrl-C: a command ends within a second, and says what it leaves.

The first one raises KeyboardInterrupt, so that the command may put away what it has in hand.  It
has GRACE_S for that: a cluster that does not answer must not hold the prompt.  The second ends it
at once.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from duemq.cli.exits import Exit

GRACE_S = 0.7


class Interruption:
    """What a command says when it is interrupted.  It is said once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` prints; it is called by another thread if the command does not end by itself."""
        self.left: Callable[[], str] = lambda: ""
        """What is left, in words; must not wait."""
        self._say = say
        self._said = threading.Lock()

    def tell(self) -> None:
        """Says it, if nobody has."""
        if self._said.acquire(blocking=False):
            left = self.left()
            self._say(f"interrupted: {left}" if left else "interrupted")


@contextmanager
def bounded(interruption: Interruption) -> Iterator[None]:
    """Within, Ctrl-C ends the process after GRACE_S at the latest."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not ours
        return
    # Not an Event: the signal may come while the main thread holds its lock.
    pressed: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def end() -> None:
        if pressed.get():
            time.sleep(GRACE_S)
            _end(interruption)

    def press(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda *_: _end(interruption))
        pressed.put(True)
        raise KeyboardInterrupt

    threading.Thread(target=end, name="interrupted", daemon=True).start()
    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is press:
            signal.signal(signal.SIGINT, before)
        pressed.put(False)


@contextmanager
def handled(
    number: signal.Signals, handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Within, the signal has this handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def unbound() -> None:
    """Ctrl-C is an ordinary KeyboardInterrupt again: for who has processes of its own to end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(interruption: Interruption) -> None:
    try:
        interruption.tell()
    finally:
        os._exit(Exit.INTERRUPTED)
