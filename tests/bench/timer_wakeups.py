"""How late the timer of an event loop rings that has rested, woken sooner and not.

    python tests/bench/timer_wakeups.py [--times 40] [--rest 0.3]

The lateness that is left is the broker's part of `duemq bench lateness --rate 1`; the floor is a
sleep of the same length.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from duemq_server.serving import fine_timer
from duemq_server.serving.fine_timer import FineTimer

DELAY_S = 0.003  # as between the storing of a fire and its time


async def late_us(times: int, rest_s: float) -> list[float]:
    """Of each ring."""
    rung = asyncio.Event()
    rang_s: list[float] = []

    def ring() -> None:
        rang_s.append(time.monotonic())
        rung.set()

    timer = FineTimer(ring)
    late: list[float] = []
    for _ in range(times):
        rung.clear()
        await asyncio.sleep(rest_s)
        at_s = time.monotonic() + DELAY_S
        timer.set(DELAY_S)
        await rung.wait()
        late.append((rang_s[-1] - at_s) * 1e6)
    timer.close()
    return late


def slept_late_us(times: int, rest_s: float) -> list[float]:
    """The floor."""
    late: list[float] = []
    for _ in range(times):
        time.sleep(rest_s)
        at_s = time.monotonic() + DELAY_S
        time.sleep(DELAY_S)
        late.append((time.monotonic() - at_s) * 1e6)
    return late


def main() -> None:
    """Prints p50 and the most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--rest", type=float, default=0.3, help="seconds before each")
    given = parser.parse_args()
    print(f"{given.times} times after {given.rest:g} s: late, us, p50 and most")
    woken_s = fine_timer.WAKING_S
    for name, waking_s in (("woken sooner", woken_s), ("woken then", 0.0)):
        fine_timer.WAKING_S = waking_s
        late = asyncio.run(late_us(given.times, given.rest))
        print(f"{name:>14}: {statistics.median(late):6.0f} {max(late):6.0f}")
    floor = slept_late_us(given.times, given.rest)
    print(f"{'floor, a sleep':>14}: {statistics.median(floor):6.0f} {max(floor):6.0f}")


if __name__ == "__main__":
    main()
