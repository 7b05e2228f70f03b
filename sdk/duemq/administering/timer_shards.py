"""Timer shards as brokers know them: who owns which queue of %TIMER%, which shard is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from duemq.administering.asking import Asking, refuse_missing
from duemq.descriptions import TimerOwner, TimerStats
from duemq.errors import InvalidArgument, MissingBroker
from duemq.protocol.route import TimerShard
from duemq.protocol.timer_keys import shard_of_queue
from duemq.transport import status
from duemq.v1 import broker_pb2, timer_admin_pb2, timer_admin_pb2_grpc

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
        answers = await self._asker.each(
            timer_admin_pb2_grpc.TimerAdminStub.ask("ListTimerOwners", request)
        )
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

    async def release_timer_shard(self, shard: int) -> list[TimerOwner]:
        """Gives up the timer service of a shard whose data directory is lost; what it owned.

        The next timer service of that shard takes its queues over, and it is refused for good.
        What it held and had not delivered is lost; a few messages that it had taken over last may
        come twice.  Raises InvalidArgument if nobody owns the shard, or if the owner was seen
        within the last minute; Unavailable.
        """
        owners, missing = await self._owners()
        refuse_missing(missing, "nothing was released")
        mine = [each for each in owners if each.id and each.shard == shard]
        if not mine:
            raise InvalidArgument(
                f"shard: no timer service owns queues of shard {shard}", field="shard", value=shard
            )
        await self._release(mine)
        return mine

    async def _release(self, owned: Iterable[TimerOwner]) -> None:
        for broker, service_id in sorted({(each.broker, each.id) for each in owned}):
            address = self._client.broker(broker).address
            stub = timer_admin_pb2_grpc.TimerAdminStub(self._client.channel(address))
            request = timer_admin_pb2.ReleaseTimerQueuesRequest(id=service_id)
            await status.answer(stub.ReleaseTimerQueues(request, timeout=TIMEOUT_S), address)

    async def _forget_holder(self, name: str) -> None:
        """No broker that is there tells any more that this service may hold timers."""
        owners, _ = await self._owners()
        await self._release(each for each in owners if each.queue_id is None and each.name == name)

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
