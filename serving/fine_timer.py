"""A timer of the event loop that rings to a tenth of a millisecond.

asyncio sleeps for whole milliseconds, rounded up.  Linux has timers that are files, which it can
watch (timerfd_create(2)); elsewhere asyncio's own timer is used.

A processor that has rested takes 0.1 to 0.2 ms to wake up (tests/bench/timer_wakeups.py).  So who
has not rung for a while is woken a little sooner, and looks at the clock until the time has come.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_NS = 1_000_000_000
WAKING_S = 0.000_3
RESTED_S = 0.1  # looking at the clock costs at most WAKING_S / RESTED_S of a processor


class _Spec(ctypes.Structure):
    """struct itimerspec: rings once, in so long."""

    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


class FineTimer:
    """Owned by one part of the event loop, and closed by it."""

    def __init__(self, ring: Callable[[], None]) -> None:
        """`ring`: called when the time has come."""
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False
        self._at_s = 0.0  # of the monotonic clock
        self._rang_s = 0.0
        self._file = _open()
        if self._file is not None:
            self._loop.add_reader(self._file, self._readable, self._file)

    def set(self, delay_s: float) -> None:
        """Rings once, after so long, and not when it was to ring before; never once closed."""
        if self._closed:
            return
        if self._file is None:
            self.cancel()
            self._handle = self._loop.call_later(max(delay_s, 0.0), self._ring)
        else:
            now_s = time.monotonic()
            self._at_s = now_s + delay_s
            rested = now_s - self._rang_s >= RESTED_S
            _set(self._file, max(round((delay_s - WAKING_S * rested) * _NS), 1))

    def cancel(self) -> None:
        """Does not ring any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._file is not None:
            _set(self._file, 0)

    def close(self) -> None:
        """Never rings again."""
        self.cancel()
        self._closed = True
        if self._file is not None:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = None

    def _readable(self, file: int) -> None:
        try:
            os.read(file, 8)
        except BlockingIOError:
            return  # it was set anew, or cancelled, meanwhile
        while (now_s := time.monotonic()) < self._at_s:
            pass
        self._rang_s = now_s
        self._ring()


def _libc() -> ctypes.CDLL | None:
    """The C library, if it has timers that are files."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.timerfd_settime.argtypes = (
            ctypes.c_int,
            ctypes.c_int,
            ctypes.POINTER(_Spec),
            ctypes.c_void_p,
        )
        libc.timerfd_create.argtypes = (ctypes.c_int, ctypes.c_int)
    except (AttributeError, OSError, TypeError):
        return None
    return libc


_LIBC = _libc()


def _open() -> int | None:
    if _LIBC is None:
        return None
    file: int = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return file if file >= 0 else None


def _set(file: int, delay_ns: int) -> None:
    """0: not at all."""
    assert _LIBC is not None
    spec = _Spec((0, 0), divmod(delay_ns, _NS))
    if _LIBC.timerfd_settime(file, 0, ctypes.byref(spec), None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
