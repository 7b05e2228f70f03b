"""When memory is given back, and that it is."""

import asyncio
import subprocess
import sys
from itertools import pairwise

import pytest

from duemq_server.serving.resources import memory
from duemq_server.serving.resources.memory import (
    FREED_BYTES_MIN,
    LOOK_S,
    QUIET_CPU,
    RETRY_S_MAX,
    RETRY_S_MIN,
    SPARE_BYTES,
    Spare,
)

LEAST = 50 << 20
MUCH = LEAST + SPARE_BYTES + 1
WAIT_S = 60.0

# Frees 200 MB below a block that stays, and waits until the watch has given them back.
BURST = """
import asyncio
from duemq.transport.tuning import tune_process
from duemq_server.serving.resources import memory

async def main():
    memory.LOOK_S = 0.1
    looked = asyncio.Event()

    def rss():
        looked.set()
        return memory.rss_bytes()

    async def next_look():
        looked.clear()
        await looked.wait()

    watching = asyncio.create_task(memory.watch(rss))
    await next_look()
    least = memory.rss_bytes()
    burst = [bytes(100_000) for _ in range(2_000)]
    stays = bytes(100_000)
    grown = memory.rss_bytes() - least
    burst.clear()
    while memory.rss_bytes() - least > grown / 2:
        await next_look()
    watching.cancel()
    print(grown, len(stays))

tune_process()
asyncio.run(main())
"""


def quiet(spare: Spare) -> None:
    assert not spare.look(LEAST, 0.0, 0.0)


def test_what_was_taken_in_a_burst_is_given_back_once_it_is_quiet() -> None:
    spare = Spare()
    quiet(spare)
    busy_s = LOOK_S * QUIET_CPU * 1.1
    assert not spare.look(MUCH, busy_s, LOOK_S)
    assert spare.look(MUCH, busy_s, 2 * LOOK_S)


def test_little_is_kept() -> None:
    spare = Spare()
    quiet(spare)
    assert not spare.look(LEAST + SPARE_BYTES, 0.0, LOOK_S)


def test_memory_in_use_is_tried_ever_more_seldom() -> None:
    spare = Spare()
    quiet(spare)
    tried, now_s = [], 0.0
    while now_s < 4 * RETRY_S_MAX:
        now_s += LOOK_S
        if spare.look(MUCH, 0.0, now_s):
            tried.append(now_s)
            spare.tried(FREED_BYTES_MIN - 1, now_s)
    pauses = [after - before for before, after in pairwise(tried)]
    assert pauses[0] >= RETRY_S_MIN
    assert pauses == sorted(pauses)
    assert RETRY_S_MAX <= pauses[-1] <= RETRY_S_MAX + LOOK_S
    spare.tried(FREED_BYTES_MIN, now_s)
    assert spare.look(MUCH, 0.0, now_s + RETRY_S_MIN)


async def test_without_a_thread_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    enough = asyncio.Event()

    async def to_thread(_: object) -> None:
        tried.append(0)
        if len(tried) > 1:
            enough.set()
        raise RuntimeError("can't start new thread")

    class Always(Spare):
        def look(self, *_: object) -> bool:
            return True

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    monkeypatch.setattr(memory, "LOOK_S", 0.0)
    monkeypatch.setattr(memory, "Spare", Always)
    watch = asyncio.create_task(memory.watch())
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait((watch, waiting), return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    waiting.cancel()
    assert enough.is_set()


def test_a_burst_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BURST], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    grown, stays = map(int, done.stdout.split())
    assert grown > 2 * SPARE_BYTES
    assert stays == 100_000
