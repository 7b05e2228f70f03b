"""A new shard keeps back what the others keep back, before it takes anything over.

`duemq timer hold` asks the shards that there are; one that comes later was not asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from duemq.errors import DuemqError, Unavailable
from duemq.protocol.route import TimerShard
from duemq.transport import status
from duemq.v1 import timer_holds_pb2, timer_holds_pb2_grpc, timer_pb2, timer_pb2_grpc
from duemq_server.timer_service.disk.place import Place
from duemq_server.timer_service.edge.others.other_shards import TIMEOUT_S, OtherShards
from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.shard import Shard

log = logging.getLogger(__name__)

_ASK_STATS = timer_pb2.GetStatsRequest()


class HoldsOfOthers:
    """Of one shard."""

    def __init__(self, shard: Shard, others: OtherShards, place: Place) -> None:
        self._shard = shard
        self._others = others
        self._place = place

    async def adopt(self) -> None:
        """Holds what others hold, if nothing was ever taken over here, or since it had left.

        All of them hold the same, so one answer will do.  Raises DuemqErrors: none of those that
        there are answers; StorageError.
        """
        if self._shard.scheduler.numbers.sources and not self._place.returns:
            return
        # Who hands queues over starts anew, and brokers may tell of it before nameservers do; those
        # that are there may be new themselves.
        away = self._others.lost_beside(self._place.shard)
        if not await self._adopt_from(self._others.alive, only_old=bool(away)) and away:
            raise Unavailable(
                f"what is held is not known while {', '.join(away)} is away",
                field="timer_shard",
                value=", ".join(away),
            )
        if self._place.returns:
            await asyncio.to_thread(self._place.returned)

    async def _adopt_from(self, alive: Sequence[TimerShard], *, only_old: bool) -> bool:
        """Whether any answered; `only_old`: of those that ever took anything over."""
        answers = await asyncio.gather(*(self._holds(each, only_old) for each in alive))
        failed = [each for each in answers if isinstance(each, DuemqError)]
        if failed and len(failed) == len(answers):
            raise failed[0]
        found = [each for each in answers if isinstance(each, list)]
        for answer in found:
            for each in answer:
                await self._hold(each)
        return bool(found)

    async def _holds(
        self, shard: TimerShard, only_old: bool
    ) -> list[timer_holds_pb2.TimerHold] | DuemqError | None:
        """None: it is new."""
        to, address = self._others.channel(shard), shard.address
        try:
            if only_old:
                stats = timer_pb2_grpc.TimerStub(to).GetStats(_ASK_STATS, timeout=TIMEOUT_S)
                if not (await status.answer(stats, address)).accepted:
                    return None
            stub = timer_holds_pb2_grpc.TimerHoldsStub(to)
            call = stub.ListTimerHolds(timer_holds_pb2.ListTimerHoldsRequest(), timeout=TIMEOUT_S)
            return list((await status.answer(call, address)).holds)
        except DuemqError as error:
            return error

    async def _hold(self, held: timer_holds_pb2.TimerHold) -> None:
        hold = partial(changes.hold, topic=held.topic, prefix=held.key_prefix)
        if await self._shard.change(hold, makes_room=True):
            log.info("%s %s is held, as at other shards", held.topic, held.key_prefix or "(all)")
