"""A call of a timer shard to its disk fails once, whichever it is: full, or broken.

As test_store_disk_faults.py; what holds in the end is what tests/property/timer_world.py checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from duemq_server.storage.errors import DiskFull, StorageError
from duemq_server.timer_service.timers.keyed import TimerKey
from duemq_server.timer_service.timers.limits import AHEAD_MS
from tests.crash.failing_disk import FailingDisk, Faults, calls_of
from tests.crash.faulty_disk import FaultyDisk
from tests.property.timer_world import OTHER, TIGHT, TOPICS, World

TRIES_MAX = 3
STEP = 6
"""Of so many calls one is tried: all take a minute."""
HOUR_MS = 3_600_000
KEYS = [TimerKey("any", "key-1"), TimerKey("any", "key-2")]


class FailingWorld(World):
    """Its shard is started again when it ends."""

    def __init__(self, faults: Faults, *, power: bool) -> None:
        super().__init__(1, TIGHT)
        self.power = power
        self.disk = FailingDisk.of(self.disk, faults)
        self.end()

    def end(self) -> None:
        if self.power:
            self.power_cut()
        else:
            self.kill()

    def _start(self, disk: FaultyDisk) -> None:
        for _ in range(TRIES_MAX):
            self.disk = disk
            try:
                self.directory = self._open()
                return
            except (StorageError, OSError):
                disk = disk.after_power_cut(self.random) if self.power else disk.after_kill()
        raise AssertionError("it does not start")

    def do(self, work: Callable[[], object]) -> None:
        """Once; who asked asks again."""
        try:
            work()
        except DiskFull:
            pass
        except (StorageError, OSError):
            self.end()

    def accept_all(self, waits: list[int]) -> None:
        self.broker.accept([self.now_ms + wait for wait in waits], 40, "any")

    def work(self, passed_ms: int, rounds: int) -> None:
        for _ in range(rounds):
            self.now_ms += passed_ms
            self.do(lambda: self.ingest(3))
            self.do(lambda: self.tick(AHEAD_MS))
            self.do(self.housekeep)
            self.do(self.sync)
            self.do(self.send)


def live(faults: Faults, *, power: bool) -> None:
    world = FailingWorld(faults, power=power)
    keyed = world.keyed
    world.accept_all([5, 100, 2_000, HOUR_MS, 3 * HOUR_MS, 2_400 * HOUR_MS] * 4)
    world.accept_all([20_000 + 100 * number for number in range(60)])
    world.work(10, 3)
    world.do(world.flush)
    world.do(world.checkpoint)
    two = [each.key for each in KEYS]
    world.do(lambda: keyed.schedule(two, [9_000, 2 * HOUR_MS], 20, "any", if_absent=False))
    world.work(100, 2)
    world.do(lambda: keyed.reschedule([KEYS[1], 4], [50_000, 60_000], fire=False))
    world.do(world.flush)
    world.do(lambda: world.holds.hold("any", "k"))
    world.work(8_000, 3)
    world.set_topics([])  # what is due is stuck, and parked
    world.accept_all([10] * 120)
    world.work(100, 6)
    world.do(world.checkpoint)
    world.set_topics(sorted(TOPICS))
    world.set_away({OTHER})
    world.end()
    world.do(lambda: world.holds.resume("any", "k"))
    world.work(3_000, 3)
    world.do(lambda: keyed.cancel(KEYS))
    world.work(HOUR_MS // 2, 4)
    world.do(world.checkpoint)
    world.end()
    faults.over = True
    world.drain()


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("kind", ["full", "broken"])
@pytest.mark.parametrize("at", calls_of(partial(live, power=True), STEP))
def test_a_call_that_fails_loses_and_repeats_nothing(kind: str, at: int, power: bool) -> None:
    faults = Faults(kind, at)
    live(faults, power=power)
    assert faults.calls >= at
