"""Timer shards as brokers know them: who owns which queue of %TIMER%, which shard is missing."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

from duemq.client import Client
from duemq.descriptions import TimerOwner, TimerStats
from duemq.errors import DuemqError, InvalidArgument, Unavailable
from duemq.route import Broker, TimerShard
from duemq.rpc import status
from duemq.v1 import timer_admin_pb2, timer_admin_pb2_grpc

# Of each broker; the others' answers are worth showing without it.
TIMEOUT_S = 2.0


class TimerShards:
    """What brokers are asked about timer services."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def owners(self) -> list[TimerOwner]:
        """Of every queue of %TIMER%.  Raises Unavailable if a broker does not answer."""
        found, away = await self._owners()
        if away:
            raise Unavailable(f"no answer of {', '.join(away)}: {next(iter(away.values()))}")
        return found

    async def _owners(self) -> tuple[list[TimerOwner], dict[str, DuemqError]]:
        brokers = sorted(self._client.routes.brokers, key=lambda broker: broker.name)
        answers = await asyncio.gather(*map(self._ask, brokers), return_exceptions=True)
        found: list[TimerOwner] = []
        away: dict[str, DuemqError] = {}
        for broker, answer in zip(brokers, answers, strict=True):
            if isinstance(answer, DuemqError):
                away[broker.name] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found += answer
        return found, away

    async def _ask(self, broker: Broker) -> list[TimerOwner]:
        stub = timer_admin_pb2_grpc.TimerAdminStub(self._client.channel(broker.address))
        call = stub.ListTimerOwners(timer_admin_pb2.ListTimerOwnersRequest(), timeout=TIMEOUT_S)
        answer = await status.answer(call, broker.address)
        return [_owner(broker.name, queue) for queue in answer.queues]

    async def release(self, shard: int) -> list[TimerOwner]:
        """See Admin.release_timer_shard."""
        mine = [each for each in await self.owners() if each.id and each.shard == shard]
        if not mine:
            raise InvalidArgument(
                f"shard: no timer service owns queues of shard {shard}", field="shard", value=shard
            )
        for broker, service_id in sorted({(each.broker, each.id) for each in mine}):
            address = self._client.broker(broker).address
            stub = timer_admin_pb2_grpc.TimerAdminStub(self._client.channel(address))
            request = timer_admin_pb2.ReleaseTimerQueuesRequest(id=service_id)
            await status.answer(stub.ReleaseTimerQueues(request, timeout=TIMEOUT_S), address)
        return mine

    async def missing(self, alive: Sequence[TimerShard]) -> list[TimerStats]:
        """Shards that nobody serves, though brokers accept delayed messages for them."""
        if not self._client.routes.brokers:
            return []
        owners, _ = await self._owners()
        claimed = [each.shards for each in owners if each.id]
        shards = max([1, *(each.shards for each in alive), *claimed])
        of_shard: defaultdict[int, list[TimerOwner]] = defaultdict(list)
        for each in owners:
            of_shard[each.queue_id % shards].append(each)
        lost = sorted(set(range(shards)) - {each.shard for each in alive})
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


def _missing(shard: int, shards: int, queues: Iterable[TimerOwner]) -> TimerStats:
    """As its stats would be, with an error that says all that is known."""
    queues = list(queues)
    names = sorted({each.name for each in queues if each.name})
    refused = sorted({each.refused for each in queues if each.refused})
    waiting = sum(each.waiting for each in queues)
    parts = [f"no timer service is alive for shard {shard} of {shards}"]
    parts.append(f"{waiting} delayed messages wait at brokers for it")
    if names:
        parts.append(f"its queues belong to {', '.join(names)}")
    if refused:
        parts.append(f"{', '.join(refused)} was refused: see `duemq timer release`")
    return TimerStats(", ".join(names), "", shard, shards, "; ".join(parts))
