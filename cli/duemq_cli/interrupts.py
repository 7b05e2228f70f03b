"""Ctrl-C: a command ends within a second, and says what it leaves.

The first one raises KeyboardInterrupt, so that the command may put away what it has in hand.  It
has GRACE_S for that: a cluster that does not answer must not hold the prompt.  The second ends it
at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from duemq_cli.exits import Exit

GRACE_S = 0.7
# Longest wait of a main thread that has handlers of its own: a signal that comes just before a wait
# for a lock does not end it.
WAIT_S_MAX = 0.5
POKE_S = 0.05
# A signal that nobody sends us otherwise; Windows has none, and needs none.
POKE = getattr(signal, "SIGURG", signal.SIGTERM)


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
    # Handlers run when the main thread comes to it.  That may never be: a signal that comes just
    # before it waits for a lock does not end the wait.  The wake-up socket is written at once.
    heard, told = socket.socketpair()
    told.setblocking(False)
    press = _Press()

    def watch() -> None:
        with heard:
            while _hears(heard, None):
                if press.counts:
                    press.end_soon(heard)
                    _end(interruption)

    threading.Thread(target=watch, name="interrupts", daemon=True).start()
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    try:
        with handled(signal.SIGINT, press), handled(POKE, lambda *_: None):
            yield
    finally:
        signal.set_wakeup_fd(before)
        if not press.raised:
            told.close()  # it ends the watch


class _Press:
    """The handler: raises KeyboardInterrupt in the main thread, once."""

    def __init__(self) -> None:
        self.raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.raised:
            self.raised = True
            raise KeyboardInterrupt

    @property
    def counts(self) -> bool:
        """It is, or was, up to us: the command has no handler of its own."""
        return self.raised or signal.getsignal(signal.SIGINT) is self

    def end_soon(self, heard: socket.socket) -> None:
        """Returns after GRACE_S, or with the second Ctrl-C."""
        deadline = time.monotonic() + GRACE_S
        while (left_s := deadline - time.monotonic()) > 0:
            self._ensure()
            if _hears(heard, min(left_s, POKE_S)):
                return

    def _ensure(self) -> None:
        """Ends a wait of the main thread that the signal has not ended."""
        if not self.raised and hasattr(signal, "pthread_kill"):
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, POKE)


def _hears(heard: socket.socket, timeout_s: float | None) -> bool:
    """Whether SIGINT came in time; False, too, when it is over."""
    heard.settimeout(timeout_s)
    try:
        while signals := heard.recv(64):
            if signal.SIGINT in signals:
                return True
    except TimeoutError:
        pass
    return False


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
