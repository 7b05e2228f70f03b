"""Timer shards: who owns which queue of %TIMER%, and questions to all of them or one.

Whose part is not in an answer is named, as brokers are in asking.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from duemq.administering.asking import SHOWN_WITHOUT_TIMEOUT_S, Asking, Method, T, refuse_missing
from duemq.descriptions import TimerOwner, TimerStats
from duemq.errors import (
    Internal,
    MissingBroker,
    Overloaded,
    Timeout,
    Unavailable,
    Unsupported,
)
from duemq.protocol import checks
from duemq.protocol.route import TimerShard
from duemq.protocol.timer_keys import shard_of_queue
from duemq.v1 import broker_pb2, stubs, timer_admin_pb2

# Of a release, which is not repeated: a second one would find no owner.
TIMEOUT_S = 2.0


class TimerShards(Asking):
    """What the admin client asks brokers about timer services."""

    async def timer_owners(self) -> list[TimerOwner]:
        """Who owns each queue of delayed messages, and who owns none and may hold some.

        Raises PartialAnswer, whose `partial` is the list, if a broker is away.
        """
        found, missing = await self._owners()
        refuse_missing(missing, partial=found)
        return found

    async def _owners(self) -> tuple[list[TimerOwner], Sequence[MissingBroker]]:
        request = timer_admin_pb2.ListTimerOwnersRequest()
        answers = await self._asker.each(stubs.TimerAdminStub.ask("ListTimerOwners", request))
        found = [
            _owner(broker, queue)
            for broker, answer in answers.by_broker.items()
            for queue in answer.queues
        ]
        found += [
            _holder(broker, other)
            for broker, answer in answers.by_broker.items()
            for other in answer.others
        ]
        return found, answers.missing

    async def release_timer_shard(self, shard: int, *, dry_run: bool = False) -> list[TimerOwner]:
        """Gives up the timer service of a shard whose data directory is lost; what it owned.

        The next timer service of that shard takes its queues over, and it is refused for good.
        What it held is lost; a few messages that it had taken over last may come twice.  A
        successor keeps what it has.  `dry_run` only answers.  Raises InvalidArgument if nobody owns
        the shard, or who does was seen within the last minute; Unavailable.
        """
        owners, missing = await self._owners()
        alive = {each.store_id for each in self._client.routes.timers}
        lost = [each for each in owners if each.shard == shard and each.id not in {0, *alive}]
        refuse_missing(missing, "nothing was released", lost if dry_run else None)
        if not lost:
            limit = "no owner of it is gone: stop it first, and wait a minute"
            raise checks.wrong("shard", shard, limit)
        if not dry_run:
            await self._release(lost)
        return lost

    async def _release(self, owned: Iterable[TimerOwner]) -> None:
        for broker, service_id in sorted({(each.broker, each.id) for each in owned}):
            request = timer_admin_pb2.ReleaseTimerQueuesRequest(id=service_id)
            release = stubs.TimerAdminStub.ask("ReleaseTimerQueues", request)
            await self._client.once(self._client.broker(broker).address, release, TIMEOUT_S)

    async def _forget_holder(self, name: str) -> Sequence[MissingBroker]:
        """No broker tells any more that it may hold timers.  Answers which are away."""
        owners, missing = await self._owners()
        await self._release(each for each in owners if each.queue_id is None and each.name == name)
        return missing

    async def _missing_shards(self, alive: Sequence[TimerShard]) -> list[TimerStats]:
        """Shards that nobody serves, though brokers accept delayed messages for them."""
        routes = self._client.routes
        owners: list[TimerOwner] = []
        if routes.brokers:
            owners, _ = await self._owners()
        claimed = [1 if routes.brokers else 0, *(each.shards for each in owners if each.id)]
        shards = max(routes.shards, routes.key_shards, *claimed)
        of_shard: defaultdict[int, list[TimerOwner]] = defaultdict(list)
        for each in owners:
            queue_id = each.queue_id
            shard = each.shard if queue_id is None else shard_of_queue(queue_id, shards)
            of_shard[shard].append(each)
        holders = {each.shard for each in owners if each.queue_id is None}
        lost = sorted({*range(shards), *holders} - {each.shard for each in alive})
        return [_missing(shard, shards, of_shard[shard]) for shard in lost]


def _owner(broker: str, queue: timer_admin_pb2.TimerQueueOwner) -> TimerOwner:
    return TimerOwner(
        broker,
        queue.queue_id,
        id=queue.owner.id,
        name=queue.owner.name,
        shard=queue.owner.shard,
        shards=queue.owner.shards,
        since_ms=queue.since_ms or None,
        last_seen_ms=queue.last_seen_ms or None,
        released=queue.released,
        refused=queue.refused.name,
        taken_over=queue.committed_offset,
        waiting=queue.waiting,
    )


def _holder(broker: str, service: broker_pb2.TimerService) -> TimerOwner:
    return TimerOwner(
        broker, None, id=service.id, name=service.name, shard=service.shard, shards=service.shards
    )


def _missing(shard: int, shards: int, queues: Iterable[TimerOwner]) -> TimerStats:
    """As its stats would be, with an error that says all that is known."""
    queues = list(queues)
    names = sorted({each.name for each in queues if each.name and each.queue_id is not None})
    holders = sorted({each.name for each in queues if each.queue_id is None})
    refused = sorted({each.refused for each in queues if each.refused})
    waiting = sum(each.waiting for each in queues)
    parts = [f"no timer service is alive for shard {shard} of {shards}"]
    parts.append(f"{waiting} delayed messages wait at brokers for it")
    if names:
        parts.append(f"its queues belong to {', '.join(names)}")
    if holders:
        parts.append(f"what it took over before waits at {', '.join(holders)}")
    if refused:
        parts.append(f"{', '.join(refused)} was refused: see `duemq timer release`")
    names = sorted({*names, *holders})
    return TimerStats(", ".join(names), "", shard, shards, "; ".join(parts))


class AskingShards(TimerShards):
    """What the parts of the admin client stand on that ask timer shards."""

    async def _each_shard(
        self, method: Method[T], timeout_s: float = SHOWN_WITHOUT_TIMEOUT_S
    ) -> tuple[list[T], Sequence[MissingBroker]]:
        """The answers of the shards that are there, and the shards whose part is not in them."""
        alive, missing = self._shards(), list[MissingBroker]()
        asked = (self._ask_or_miss(shard, method, missing, timeout_s) for shard in alive)
        answers = await self._together(asked)
        missing += await self._lost(alive)
        found = [each for each in answers if each is not None]
        return found, sorted(missing, key=lambda each: each.name)

    async def _together(self, asked: Iterable[Awaitable[T]]) -> list[T]:
        """All the answers, in order."""
        return await asyncio.gather(*asked)

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def _shards(self) -> Sequence[TimerShard]:
        """Whom to ask."""
        return self._client.routes.timers

    async def _lost(self, alive: Sequence[TimerShard]) -> list[MissingBroker]:
        """Who else is missing; once these answered, also who was given queues meanwhile."""
        lost = await self._missing_shards(alive)
        if not (alive or lost):
            self._asker.brokers()  # raises: nobody knows who is missing
        return [MissingBroker(shard_name(each), each.error or "") for each in lost]

    async def _ask_or_miss(
        self,
        shard: TimerShard,
        method: Method[T],
        missing: list[MissingBroker],
        timeout_s: float = SHOWN_WITHOUT_TIMEOUT_S,
    ) -> T | None:
        """A shard's answer; None: it is in `missing`."""
        try:
            return await self._ask(lambda: self._address_of(shard), method, timeout_s)
        except (Unavailable, Internal, Unsupported) as error:
            if isinstance(error, Overloaded) and not error.retryable:
                raise  # it has answered, and will say the same again
            missing.append(MissingBroker(shard_name(shard), str(error)))
            return None

    async def _at_shard(self, shard: int, method: Method[T]) -> T:
        """The answer of one shard, by its number.  Raises DuemqErrors."""
        return await self._ask(
            lambda: self._client.timer_shard(shard).address, method, self._asker.timeout_s
        )

    async def _ask(self, address: Callable[[], str], method: Method[T], timeout_s: float) -> T:
        """Asked again while a shard has no leader, say: each question may be repeated."""
        return await self._client.call(address, method, min(timeout_s, self._asker.timeout_s))

    def _address_of(self, shard: TimerShard) -> str:
        """Where it is now: another of its replicas may lead."""
        for each in self._client.routes.timers:
            if each.name == shard.name:
                return each.address
        raise Unavailable(f"{shard.name} is away", field="timer_shard", value=shard.shard)

    async def _shards_known(self) -> int:
        """Waits until it is known how many keep schedules.  Raises Unavailable."""
        client = self._client
        if not client.routes.key_shards:
            try:
                await client.wait_for(lambda routes: routes.key_shards > 0, self._asker.timeout_s)
            except Timeout:
                raise Unavailable(
                    "the nameservers know no timer shard: nobody keeps schedules", field="name"
                ) from None
        return client.routes.key_shards


def shard_name(shard: TimerShard | TimerStats) -> str:
    """As a missing shard is named."""
    number = f"timer shard {shard.shard}"
    return f"{number} ({shard.name})" if shard.name else number
