"""The budget of answers that clients have not read."""

import asyncio

import pytest

from duemq.errors import Overloaded
from duemq_server.serving.unsent import CONNECTION_PART, Unsent

MIB = 1 << 20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def unsent(clock: Clock) -> Unsent:
    return Unsent(CONNECTION_PART * MIB, 60, clock)


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_connection_waits_for_its_own_answers_and_holds_up_nobody(unsent: Unsent) -> None:
    first = await unsent.take("a", MIB)
    more = asyncio.create_task(unsent.take("a", MIB))
    other = await unsent.take("b", MIB)
    await turns()
    assert not more.done()
    other.give_back()
    await turns()
    assert not more.done()
    first.give_back()
    (await more).give_back()
    assert unsent.held == unsent.waiting == 0


async def test_who_waits_for_the_whole_budget_takes_turns(unsent: Unsent) -> None:
    held = [await unsent.take(f"c{number}", MIB) for number in range(CONNECTION_PART)]
    order: list[str] = []

    async def wait(peer: str) -> None:
        share = await unsent.take(peer, MIB)
        order.append(peer)
        share.give_back()

    tasks = [asyncio.create_task(wait(peer)) for peer in ("x", "x", "y")]
    await turns()
    assert unsent.held == unsent.bytes_max
    assert unsent.waiting == 3
    held.pop().give_back()
    await asyncio.gather(*tasks)
    assert order == ["x", "y", "x"]


async def test_an_answer_that_is_larger_than_all_goes_alone(unsent: Unsent) -> None:
    share = unsent.take_now("a", 100 * MIB)
    with pytest.raises(Overloaded) as refused:
        unsent.take_now("a", 1)
    assert refused.value.limit == str(unsent.connection_bytes_max)
    with pytest.raises(Overloaded) as refused:
        unsent.take_now("b", 1)
    assert refused.value.limit == str(unsent.bytes_max)
    share.give_back()
    unsent.take_now("b", 1).give_back()


async def test_a_share_is_given_back_once(unsent: Unsent) -> None:
    share, other = unsent.take_now("a", 10), unsent.take_now("a", 20)
    share.resize(5)
    assert unsent.held == 25
    share.give_back()
    share.give_back()
    assert unsent.held == 20
    other.give_back()
    assert unsent.held == 0


async def test_who_stops_waiting_leaves_nothing_behind(unsent: Unsent) -> None:
    share = await unsent.take("a", MIB)
    waiters = [asyncio.create_task(unsent.take("a", MIB)) for _ in range(3)]
    await turns()
    waiters[0].cancel()
    share.give_back()  # granted to the second in the same turn as
    waiters[1].cancel()
    (await waiters[2]).give_back()
    assert unsent.held == unsent.waiting == 0


async def test_a_wait_has_an_end() -> None:
    refused: list[int] = []
    unsent = Unsent(CONNECTION_PART, 0.001, on_refused=lambda: refused.append(1))
    unsent.take_now("a", 1)
    with pytest.raises(Overloaded):
        await unsent.take("a", 1)
    assert refused == [1]
    assert unsent.waiting == 0


async def test_an_answer_that_is_not_read_makes_its_connection_stuck(
    unsent: Unsent, clock: Clock
) -> None:
    old = unsent.take_now("a", 10)
    clock.now = 59
    unsent.take_now("a", 10)
    unsent.take_now("b", 10)
    assert unsent.stuck() == []
    clock.now = 60
    assert unsent.stuck() == ["a"]
    old.give_back()
    assert unsent.stuck() == []
