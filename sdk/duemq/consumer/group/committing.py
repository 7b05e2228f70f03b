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


class _Turn:
    """What goes to a broker together."""

    def __init__(self) -> None:
        self.holdings: dict[Holding, None] = {}
        self.over = False
        self.lost: list[Lost] = []


class Committer:
    """Tells brokers how far queues are.

    One request a broker at a time, so that no commit is overtaken by an older one.  What is asked
    for meanwhile goes together in the next one: a broker that is away is waited for twice at most.
    """

    def __init__(self, offsets: OffsetClient, group: str) -> None:
        self._offsets = offsets
        self._group = group
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by broker
        self._next: dict[str, _Turn] = {}  # by broker: who joins waits for the lock

    async def commit(self, holdings: Iterable[Holding]) -> list[Lost]:
        """Saves what changed; answers the queues that others have taken over, or that are gone.

        What could not be saved in time is logged: it may be consumed again.
        """
        by_broker: defaultdict[str, list[Holding]] = defaultdict(list)
        for holding in holdings:
            if holding.source is not None:
                by_broker[holding.queue.broker].append(holding)
        answers = await asyncio.gather(
            *(self._commit_at(broker, each) for broker, each in by_broker.items())
        )
        return [lost for answer in answers for lost in answer]

    async def _commit_at(self, broker: str, holdings: list[Holding]) -> list[Lost]:
        turn = self._next.setdefault(broker, _Turn())
        turn.holdings.update(dict.fromkeys(holdings))
        async with self._locks[broker]:
            if not turn.over:  # nobody who joined has had the lock
                if self._next.get(broker) is turn:
                    del self._next[broker]
                turn.lost = await self._send(broker, turn.holdings)
                turn.over = True
        return [lost for lost in turn.lost if lost[0] in holdings]

    async def _send(self, broker: str, holdings: Iterable[Holding]) -> list[Lost]:
        commits = _changed(holdings)
        if not commits:
            return []

        async def attempt(left_s: float) -> dict[MessageQueue, DuemqError]:
            return await self._offsets.commit(broker, commits.values(), left_s)

        try:
            refused = await retrying.until(monotonic() + REQUEST_TIMEOUT_S, attempt)
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
