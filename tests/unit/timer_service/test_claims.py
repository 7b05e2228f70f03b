"""When a shard claims again, against a loop whose time is a number."""

from types import SimpleNamespace
from typing import Any

import pytest

from duemq.errors import DuemqError, FencedTimer, Unavailable
from duemq.protocol.route import Broker
from duemq.v1 import broker_pb2
from duemq_server.timer_service.edge.broker_link import (
    CLAIM_RETRY_S,
    COMMIT_INTERVAL_S,
    EMPTY_LOOK_S,
    BrokerLink,
)
from tests.manual_loop import ManualLoop

MINUTE_S = 60.0
TOO_MANY = 200


class Leaving:
    """The links of a shard that leaves."""

    place = SimpleNamespace(leaves=True)

    def __init__(self) -> None:
        self.empty = False

    def turn(self, _: BrokerLink) -> "Leaving":
        return self

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...

    def claims_changed(self) -> None: ...

    def say(self, *_: object) -> None: ...


class Link(BrokerLink):
    """To a broker that answers as it is told."""

    answer: DuemqError | None = None

    def __init__(self, links: Leaving) -> None:
        shard: Any = SimpleNamespace()
        to: Any = links
        super().__init__(to, shard, Broker("b", "127.0.0.1:1", 7))
        self.told: list[bool] = []

    async def _claim(self) -> None:
        self.told.append(self._links.empty)
        assert len(self.told) < TOO_MANY  # in no time
        if self.answer is not None:
            raise self.answer
        self._told_empty = self._links.empty


@pytest.mark.parametrize("answer", [Unavailable("away"), FencedTimer("another one")])
def test_a_shard_that_left_and_is_empty_does_not_claim_all_the_time(answer: DuemqError) -> None:
    """Nobody hears that it is: its broker is away, or refuses it."""
    with ManualLoop(0) as loop:

        async def main() -> list[bool]:
            links = Leaving()
            links.empty = True
            link = Link(links)
            link.answer = answer
            await loop.silence(MINUTE_S)
            told = list(link.told)
            link.answer = None
            await loop.silence(CLAIM_RETRY_S[1] + 1)
            assert link.told[len(told) :] == [True]
            link.end()
            return told

        assert len(loop.run_until_complete(main())) < TOO_MANY - 1


def test_a_shard_that_left_tells_at_once_that_it_is_empty() -> None:
    with ManualLoop(0) as loop:

        async def main() -> None:
            links = Leaving()
            link = Link(links)
            await loop.silence(EMPTY_LOOK_S)
            assert link.told == [False]
            links.empty = True
            await loop.silence(EMPTY_LOOK_S)
            assert link.told == [False, True]
            link.end()

        loop.run_until_complete(main())


def test_an_answer_about_a_queue_that_was_not_committed_ends_no_commits() -> None:
    """The broker would keep all delayed messages from then on."""
    asked: list[int] = []

    async def answer(request: broker_pb2.CommitOffsetsRequest) -> Any:
        asked.extend(each.queue_id for each in request.commits)
        results = [broker_pb2.OffsetResult(queue_id=each) for each in (3, 0)]
        return broker_pb2.CommitOffsetsResponse(queues=results)

    with ManualLoop(0) as loop:

        async def main() -> None:
            link = Link(Leaving())
            stub: Any = SimpleNamespace(CommitOffsets=lambda request, timeout: answer(request))
            link._stub = stub
            link._shard = SimpleNamespace(directory=SimpleNamespace(producer_id=1))  # type: ignore[assignment]
            new = {0: 5}
            link._not_committed = lambda: new  # type: ignore[method-assign]
            await loop.silence(COMMIT_INTERVAL_S * 2.5)
            assert asked == [0, 0]
            assert link._committed == {0: 5}
            link.end()

        loop.run_until_complete(main())
