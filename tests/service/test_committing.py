"""How a member's commits share requests, against brokers that are played here."""

import asyncio
from types import SimpleNamespace

import pytest

from duemq.consumer.fetching.offset_client import Commit
from duemq.consumer.group.committing import Committer
from duemq.consumer.group.holdings import Holding
from duemq.errors import DuemqError, FencedMember, Internal
from duemq.protocol.balance import MessageQueue


class Brokers:
    """An OffsetClient: notes requests, answers when it is let."""

    def __init__(self) -> None:
        self.requests: list[list[tuple[int, int]]] = []
        """Of queues: id and offset."""
        self.refused: dict[MessageQueue, DuemqError] = {}
        self.away = False
        self.gate = asyncio.Event()

    async def commit(
        self, broker: str, commits, timeout_s: float
    ) -> dict[MessageQueue, DuemqError]:
        said: list[Commit] = list(commits)
        self.requests.append([(each.queue.queue_id, each.offset) for each in said])
        await self.gate.wait()
        if self.away:
            raise Internal("not asked again")
        return {each.queue: error for each in said if (error := self.refused.get(each.queue))}


def held(queue_id: int, offset: int = 7, broker: str = "b0") -> Holding:
    holding = Holding(MessageQueue("orders", broker, queue_id))
    pending = SimpleNamespace(commit_point=offset)
    holding.source = SimpleNamespace(pending=pending, generation=1, topic_id=0)
    return holding


@pytest.fixture
async def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
async def committer(brokers: Brokers) -> Committer:
    return Committer(brokers, "billing")


async def settled() -> None:
    """Until all of them wait for the broker, or for their turn."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_is_asked_for_meanwhile_goes_together(brokers, committer) -> None:
    queues = [held(number) for number in range(5)]
    asked = [asyncio.create_task(committer.commit([each])) for each in queues]
    await settled()
    queues[3].source.pending.commit_point = 8  # as of when it is sent
    brokers.gate.set()
    assert await asyncio.gather(*asked) == [[]] * 5
    assert brokers.requests == [[(0, 7)], [(1, 7), (2, 7), (3, 8), (4, 7)]]
    assert [each.committed for each in queues] == [7, 7, 7, 8, 7]


async def test_a_broker_that_is_away_is_not_waited_for_again_by_each(brokers, committer) -> None:
    brokers.away = True
    queues = [held(number) for number in range(20)]
    asked = [asyncio.create_task(committer.commit([each])) for each in queues]
    await settled()
    brokers.gate.set()
    assert await asyncio.gather(*asked) == [[]] * 20
    assert len(brokers.requests) == 2
    assert {each.committed for each in queues} == {-1}
    brokers.away = False
    await committer.commit(queues)
    assert {each.committed for each in queues} == {7}


async def test_each_hears_of_its_own_losses(brokers, committer) -> None:
    first, mine, other = map(held, range(3))
    error = FencedMember("it is another's")
    brokers.refused = {mine.queue: error}
    asked = [asyncio.create_task(committer.commit([each])) for each in (first, mine, other)]
    await settled()
    brokers.gate.set()
    assert await asyncio.gather(*asked) == [[], [(mine, error)], []]


@pytest.mark.parametrize("asked_already", [False, True])
async def test_who_goes_with_one_that_is_cancelled_is_not_left_alone(
    brokers, committer, asked_already
) -> None:
    first, cancelled, other = map(held, range(3))
    asked = [asyncio.create_task(committer.commit([each])) for each in (first, cancelled, other)]
    await settled()
    if asked_already:
        asked[0].cancel()
        await settled()
        assert len(brokers.requests) == 2
    asked[1].cancel()
    await settled()
    brokers.gate.set()
    assert await asked[2] == []
    assert other.committed == 7
