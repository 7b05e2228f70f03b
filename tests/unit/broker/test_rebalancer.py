import asyncio
from collections.abc import AsyncIterator

import pytest

from duemq.protocol.balance import MessageQueue, register_strategy
from duemq.protocol.pieces import Pieces
from duemq_server.broker import slices
from duemq_server.broker.groups.coordinator import Assignment
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.groups.subscriptions import TopicFilter
from duemq_server.broker.rebalancer import Event, Rebalancer
from duemq_server.broker.slices import Slices
from tests.unit.broker.groups.stepping import SteppingCoordinator

T0 = 1_790_000_000_000
QUEUES = [MessageQueue("orders", "b1", queue_id) for queue_id in range(4)]


class Running:
    """A rebalancer at work, and what it told."""

    def __init__(self) -> None:
        self.coordinator = SteppingCoordinator("b1")
        self.coordinator.routes_changed({"orders": QUEUES}, ["b1"], T0)
        self.told: list[list[Assignment]] = []
        self.rebalancer = Rebalancer(self.coordinator, lambda: T0, self.told.append)

    def joins(self, member_id: str, group: str = "g", strategy: str = "average") -> Event:
        async def event(_: Slices) -> None:
            subscriptions = {"orders": TopicFilter()}
            self.coordinator.enter(Hello(group, member_id, subscriptions, strategy=strategy), T0)

        return event


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    made = Running()
    task = asyncio.create_task(made.rebalancer.run())
    yield made
    task.cancel()


async def test_joins_that_come_together_are_one_rebalance(running: Running) -> None:
    await asyncio.gather(
        *(running.rebalancer.done(running.joins(f"m{number}"), "g") for number in range(4))
    )
    [assignments] = running.told
    assert {each.member_id: len(each.queues) for each in assignments} == {
        f"m{number}": 1 for number in range(4)
    }
    assert running.rebalancer.idle.is_set()


async def test_what_an_event_raises_is_told_to_its_caller_only(running: Running) -> None:
    async def wrong(_: Slices) -> None:
        raise ValueError("wrong")

    failed, fine = await asyncio.gather(
        running.rebalancer.done(wrong, "g"),
        running.rebalancer.done(running.joins("m1"), "g"),
        return_exceptions=True,
    )
    assert isinstance(failed, ValueError)
    assert fine is None
    assert len(running.told) == 1


async def test_a_strategy_that_raises_concerns_its_group_only(running: Running) -> None:
    def broken(*_):
        raise RuntimeError("broken")

    register_strategy("broken", broken)
    failed, fine = await asyncio.gather(
        running.rebalancer.done(running.joins("m1", "bad", "broken"), "bad"),
        running.rebalancer.done(running.joins("m1", "good"), "good"),
        return_exceptions=True,
    )
    assert isinstance(failed, RuntimeError)
    assert fine is None
    [[assignment]] = running.told
    assert assignment.group == "good"
    await running.rebalancer.done(running.joins("m2", "good"), "good")
    assert len(running.told) == 2


async def test_an_event_whose_caller_is_gone_is_dropped(running: Running) -> None:
    async def leaves(_: Slices) -> None:
        gone.cancel()

    first = asyncio.create_task(running.rebalancer.done(leaves))
    gone = asyncio.create_task(running.rebalancer.done(running.joins("gone"), "g"))
    await running.rebalancer.done(running.joins("stays"), "g")
    await first
    assert gone.cancelling()
    assert set(running.coordinator.group("g").members) == {"stays"}


async def test_others_have_the_loop_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    order: list[str] = []

    def work() -> Pieces[None]:
        for _ in range(2):
            order.append("work")
            yield

    async def other() -> None:
        order.append("other")

    await asyncio.gather(Slices().work(work()), other())
    assert order == ["work", "other", "work"]
