"""It rings once, when the time has come; with the timers of Linux, and without."""

import asyncio
import sys
import time

import pytest

from duemq_server.serving import fine_timer
from duemq_server.serving.fine_timer import FineTimer

LONG_S = 3_600.0


@pytest.fixture(params=["files", "asyncio"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "asyncio":
        monkeypatch.setattr(fine_timer, "_LIBC", None)
    return str(request.param)


class Bell:
    def __init__(self) -> None:
        self.rung = asyncio.Event()
        self.times = 0
        self.timer = FineTimer(self._ring)

    def _ring(self) -> None:
        self.times += 1
        self.rung.set()


async def time_to_ring() -> None:
    """Until one that was set now, for later, has rung."""
    other = Bell()
    other.timer.set(0.002)
    await other.rung.wait()
    other.timer.close()


async def test_it_rings_once_and_not_before(kind: str) -> None:
    bell = Bell()
    began = time.monotonic()
    bell.timer.set(0.0015)
    await bell.rung.wait()
    assert time.monotonic() - began >= 0.0015
    await time_to_ring()
    assert bell.times == 1
    bell.timer.close()


@pytest.mark.parametrize("delay_s", [0.0, -1.0])
async def test_it_rings_at_once_when_the_time_is_over(kind: str, delay_s: float) -> None:
    bell = Bell()
    bell.timer.set(delay_s)
    await bell.rung.wait()
    bell.timer.close()


async def test_set_anew_it_rings_then_only(kind: str) -> None:
    bell = Bell()
    bell.timer.set(0.0)
    bell.timer.set(LONG_S)
    await time_to_ring()
    assert bell.times == 0
    bell.timer.set(0.001)
    await bell.rung.wait()
    assert bell.times == 1
    bell.timer.close()


async def test_cancelled_or_closed_it_does_not_ring(kind: str) -> None:
    for end in (FineTimer.cancel, FineTimer.close):
        bell = Bell()
        bell.timer.set(0.0)
        end(bell.timer)
        await time_to_ring()
        assert bell.times == 0
        bell.timer.close()
        bell.timer.set(0.0)
        await time_to_ring()
        assert bell.times == 0


@pytest.mark.skipif(sys.platform != "linux", reason="its timers are of Linux")
async def test_linux_has_timers_that_are_files() -> None:
    timer = FineTimer(lambda: None)
    assert timer._file is not None
    timer.close()
