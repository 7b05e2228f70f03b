"""When what is ahead of its time may be stored, and when it is shown, with nothing else about."""

import asyncio

import pytest

from duemq.protocol.limits import FIRE_AHEAD_MS_MAX
from duemq_server.broker.clock import SET_BACK_KEPT_MS
from duemq_server.broker.due_gate import DueGate, seconds_left

NOW_MS = 1_760_000_000_000


@pytest.mark.parametrize(
    ("ms", "wall_ns", "left_s"),
    [(2, 7_000_000, 0.002), (2, 7_300_000, 0.0017), (1, 7_999_999, 1e-9)],
)
def test_a_wait_ends_with_the_millisecond(ms: int, wall_ns: int, left_s: float) -> None:
    assert seconds_left(ms, wall_ns) == pytest.approx(left_s, abs=1e-12)


class World:
    """Clocks that are set by hand, and a store that has something to show at `next_ms`."""

    def __init__(self) -> None:
        self.now_ms = self.steady_ms = NOW_MS
        self.hidden = self
        self.next_ms: int | None = None
        self.looks: list[int] = []
        self.looked = asyncio.Event()
        self.gate = DueGate(self, self._now, lambda: self.steady_ms)  # type: ignore[arg-type]

    def _now(self) -> int:
        return self.now_ms

    def show_due(self, due_ms: int) -> None:
        self.looks.append(due_ms)
        if self.next_ms is not None and due_ms >= self.next_ms:
            self.next_ms = None
        self.looked.set()

    def clock_was_set(self, was_ms: int, back_ms: int) -> None:
        assert was_ms == self.now_ms + back_ms
        if self.next_ms is not None:
            self.next_ms -= back_ms

    def passes(self, ms: int) -> None:
        self.now_ms += ms
        self.steady_ms += ms

    async def look(self) -> int:
        """The next one: what it took to be due."""
        self.looked.clear()
        async with asyncio.timeout(30):
            await self.looked.wait()
        return self.looks[-1]


async def test_what_is_hidden_is_shown_when_its_time_comes_and_again_for_what_follows() -> None:
    world = World()
    world.next_ms = NOW_MS + 2
    world.gate.arm()
    world.gate.arm()
    world.passes(2)
    assert await world.look() == NOW_MS + 2
    world.next_ms = NOW_MS + 4
    world.gate.arm()
    assert await world.look() == NOW_MS + 2  # the clock is not there yet: it looks again
    world.passes(2)
    assert await world.look() == NOW_MS + 4
    assert world.next_ms is None
    world.gate.close()


async def test_what_comes_sooner_is_looked_at_sooner() -> None:
    world = World()
    world.next_ms = NOW_MS + 3_600_000
    world.gate.arm()
    world.next_ms = NOW_MS
    world.gate.arm()
    assert await world.look() == NOW_MS
    world.gate.close()


@pytest.mark.parametrize("back_ms", [20, 3_600_000])
async def test_a_clock_that_is_set_back_meanwhile_hides_nothing_for_long(back_ms: int) -> None:
    """By less than a second it is waited for; else it takes as long as it would have."""
    world = World()
    world.next_ms = NOW_MS + 1
    world.gate.arm()
    world.now_ms += 1 - back_ms
    world.steady_ms += 1
    while world.next_ms is not None:
        await world.look()
        if back_ms < 1_000:
            world.passes(1)
    assert world.looks[-1] == NOW_MS + 1 - (back_ms if back_ms > 1_000 else 0)
    world.gate.close()


async def test_what_is_due_soon_by_a_clock_that_was_set_back_is_hidden_until_then() -> None:
    """For a minute all that the clock as it was had let in is stored: this is not of it."""
    world = World()
    await world.gate.hold([NOW_MS])
    world.now_ms -= 3_600_000
    for _ in range(3):
        world.passes(1_000)
        until_ms = world.now_ms + 3
        await world.gate.hold([until_ms])
        assert world.gate.due_ms(until_ms) == world.now_ms
    world.gate.close()


async def test_the_clock_as_it_was_hides_nothing_and_lets_nothing_in_ahead_of_it() -> None:
    world = World()
    await world.gate.hold([NOW_MS])
    world.now_ms -= 3_600_000
    world.passes(SET_BACK_KEPT_MS - 10)
    sent_ms = [world.now_ms + 2, world.steady_ms, world.steady_ms + 3]
    holding = asyncio.create_task(world.gate.hold(sent_ms))
    begun = asyncio.Event()
    asyncio.get_running_loop().call_soon(begun.set)
    await begun.wait()
    assert not holding.done()
    world.passes(3)
    await holding
    assert [world.gate.due_ms(each) for each in sent_ms] == [world.now_ms, *[world.steady_ms] * 2]
    world.passes(SET_BACK_KEPT_MS)
    await world.gate.hold(sent_ms)
    assert world.gate.due_ms(sent_ms[2]) == world.now_ms
    world.gate.close()


@pytest.mark.parametrize("ahead_ms", [-10, 0, FIRE_AHEAD_MS_MAX])
async def test_what_is_due_soon_may_be_stored_at_once(ahead_ms: int) -> None:
    world = World()
    await world.gate.hold([NOW_MS + ahead_ms])
    assert world.gate.due_ms(NOW_MS + ahead_ms) == NOW_MS
    world.gate.close()


async def test_what_is_due_later_waits_for_the_clock_before_it_is_stored() -> None:
    world = World()
    holding = asyncio.create_task(world.gate.hold([0, NOW_MS + FIRE_AHEAD_MS_MAX + 3]))
    begun = asyncio.Event()
    asyncio.get_running_loop().call_soon(begun.set)
    await begun.wait()
    assert not holding.done()
    world.passes(3)
    await holding
    assert world.gate.due_ms(NOW_MS + FIRE_AHEAD_MS_MAX + 3) == NOW_MS + 3
    world.gate.close()
