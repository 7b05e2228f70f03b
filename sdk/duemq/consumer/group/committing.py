"""Tells brokers how far a member's queues are."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from time import monotonic

from duemq.consumer.fetching.offset_client import REQUEST_TIMEOUT_S, Commit, OffsetClient
from duemq.consumer.group.holdings import Holding
from duemq.errors import DuemqError, FencedMember, TopicReplaced
from duemq.protocol.balance import MessageQueue
from duemq.transport import retrying

log = logging.getLogger(__name__)

Lost = tuple[Holding, FencedMember | TopicReplaced]


class Committer:
    """Tells brokers how far queues are.

    One request a broker at a time, so that no commit is overtaken by an older one.
    """

    def __init__(self, offsets: OffsetClient, group: str) -> None:
        self._offsets = offsets
        self._group = group
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by broker

    async def commit(
        self, holdings: Iterable[Holding], timeout_s: float = REQUEST_TIMEOUT_S
    ) -> list[Lost]:
        """Saves what changed; answers the queues that others have taken over, or that are gone.

        What could not be saved within the timeout is logged: it may be consumed again.
        """
        by_broker: defaultdict[str, list[Holding]] = defaultdict(list)
        for holding in holdings:
            if holding.source is not None:
                by_broker[holding.queue.broker].append(holding)
        answers = await asyncio.gather(
            *(self._commit_at(broker, each, timeout_s) for broker, each in by_broker.items())
        )
        return [lost for answer in answers for lost in answer]

    async def _commit_at(
        self, broker: str, holdings: list[Holding], timeout_s: float
    ) -> list[Lost]:
        async with self._turns[broker]:
            commits = _changed(holdings)
            if not commits:
                return []

            async def attempt(left_s: float) -> dict[MessageQueue, DuemqError]:
                return await self._offsets.commit(broker, commits.values(), left_s)

            try:
                refused = await retrying.until(monotonic() + timeout_s, attempt)
            except DuemqError as error:
                log.warning("group %s: offsets at %s not saved: %s", self._group, broker, error)
                return []
        return self._judge(commits, refused)

    def _judge(
        self, commits: dict[Holding, Commit], refused: dict[MessageQueue, DuemqError]
    ) -> list[Lost]:
        lost: list[Lost] = []
        for holding, commit in commits.items():
            error = refused.get(commit.queue)
            if error is None:
                holding.committed = commit.offset
            elif isinstance(error, FencedMember | TopicReplaced):
                lost.append((holding, error))
            else:
                log.warning("group %s: %s not saved: %s", self._group, commit, error)
        return lost


def _changed(holdings: Iterable[Holding]) -> dict[Holding, Commit]:
    """What differs from what the broker knows, as of now."""
    commits: dict[Holding, Commit] = {}
    for holding in holdings:
        source = holding.source
        if source is not None and source.pending.commit_point != holding.committed:
            offset = source.pending.commit_point
            commits[holding] = Commit(holding.queue, offset, source.generation, source.topic_id)
    return commits
