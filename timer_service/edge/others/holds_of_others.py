"""A new shard keeps back what the others keep back, before it takes anything over.

`duemq timer hold` asks the shards that there are; one that comes later was not asked.  Nor was it
asked for their bulk jobs: it notes them as over, so that one which is asked for again touches
nothing that came later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from duemq.errors import DuemqError, Unavailable
from duemq.protocol.route import TimerShard
from duemq.transport import status
from duemq.v1 import stubs, timer_holds_pb2, timer_pb2
from duemq_server.storage.errors import DiskFull
from duemq_server.timer_service.disk.place import ShardPlace
from duemq_server.timer_service.edge.bulk_requests import which_of
from duemq_server.timer_service.edge.others.other_shards import TIMEOUT_S, OtherShards
from duemq_server.timer_service.scheduling.bulk import adopting
from duemq_server.timer_service.scheduling.bulk.jobs import Which
from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.scheduling.holding.adopting import Adopting, Name
from duemq_server.timer_service.shard import Shard

log = logging.getLogger(__name__)

# Each brings what was held or resumed since the one before.
READINGS_MAX = 10
# Whom only brokers know is waited for so long: nameservers that start anew hear of who is there in
# some seconds, and who was given up they may have forgotten.
UNHEARD_S = 30.0
# Of that, what lies between two looks counts up to here: a pause of this process is no waiting.
LOOK_S_MAX = 5.0
_ASK_STATS = timer_pb2.GetStatsRequest()


class HoldsOfOthers:
    """Of one shard."""

    def __init__(self, shard: Shard, others: OtherShards, place: ShardPlace) -> None:
        self._shard = shard
        self._others = others
        self._place = place
        self._adopting = Adopting()
        self._jobs: dict[bytes, Which] = {}  # of others, as far as they were read
        self._turn = asyncio.Lock()
        self._looked_s = 0.0
        self._waited_s: float | None = None  # for whom only brokers know; None: there are none

    async def leave(self) -> None:
        """Notes that it leaves, for itself as it comes back, whichever of its replicas leads then.

        Raises as Shard.change.
        """
        async with self._turn:
            if not self._shard.scheduler.holds.left:
                await self._note_left(left=True)

    async def adopt(self) -> None:
        """Holds what others hold, if nothing was ever taken over here, or since it had left.

        All of them hold the same, so one answer will do.  Raises DuemqErrors: none of those that
        there are answers; StorageError.
        """
        async with self._turn:
            returns = self._returns()
            if self._shard.scheduler.numbers.sources and not returns:
                return
            adoptions = self._shard.scheduler.holds.adoptions
            adoptions.add(self._adopting)  # until it is through, also if that takes another call
            await self._adopt()
            adoptions.discard(self._adopting)
            self._adopting = Adopting()
            if returns:
                await self._note_left(left=False)
            if self._place.returns:
                with suppress(DiskFull):  # the log says it
                    await asyncio.to_thread(self._place.returned)

    def _returns(self) -> bool:
        left = self._shard.scheduler.holds.left
        return not self._place.leaves and (self._place.returns if left is None else left)

    async def _note_left(self, *, left: bool) -> None:
        await self._shard.change(partial(changes.note_left, left=left), makes_room=True)

    async def _adopt(self) -> None:
        for _ in range(READINGS_MAX):
            # Who hands queues over starts anew, and brokers may tell of it before nameservers do;
            # those that are there may be new themselves.
            away = [*self._others.lost_beside(self._place.shard), *self._unheard()]
            theirs = await self._read(self._others.alive, only_old=bool(away))
            if theirs is None and away:
                raise Unavailable(
                    f"what is held is not known while {', '.join(away)} is away",
                    field="timer_shard",
                    value=", ".join(away),
                )
            await self._adopt_jobs()
            if theirs is None:
                return  # who told is not there any more: that stays, until somebody resumes it
            step = self._adopting.read(theirs)
            for name in step.hold:
                await self._change(name, held=True)
            for name in step.resume:
                await self._change(name, held=False)
            if not (step.hold or step.resume):
                return
        raise Unavailable("what is held changes while it is read", field="timer_shard")

    def _unheard(self) -> list[str]:
        """Others that are not heard of yet; none, once that has been so for long."""
        others = (each for each in self._others.unheard() if each.shard != self._place.shard)
        names = [f"{each.name} (shard {each.shard})" for each in others]
        if not names:
            self._waited_s = None
            return []
        now_s = asyncio.get_running_loop().time()
        if self._waited_s is None:
            self._waited_s = 0.0
        else:
            self._waited_s += min(now_s - self._looked_s, LOOK_S_MAX)
        self._looked_s = now_s
        return names if self._waited_s < UNHEARD_S else []

    async def _read(self, alive: Sequence[TimerShard], *, only_old: bool) -> set[Name] | None:
        """What they hold; None: there are none.  `only_old`: that ever took anything over."""
        answers = await asyncio.gather(*(self._holds(each, only_old) for each in alive))
        failed = [each for each in answers if isinstance(each, DuemqError)]
        # What is not told any more need not be resumed.
        if failed and (len(failed) == len(answers) or self._adopting.adopted):
            raise failed[0]
        found = [each for each in answers if isinstance(each, list)]
        if not found:
            return None
        return {(h.topic, h.key_prefix) for each in found for h in each if not h.resuming}

    async def _adopt_jobs(self) -> None:
        jobs, self._jobs = self._jobs, {}
        if not jobs:
            return
        try:
            new = await self._shard.change(partial(adopting.adopt, theirs=jobs), makes_room=True)
        finally:
            self._shard.bulk.start()  # one that is half noted, since the log was full
        if new:
            log.info("%d bulk jobs of other shards are older than what comes here", new)

    def _note_job(self, request: timer_pb2.ChangePendingRequest) -> None:
        try:
            self._jobs[request.request_id] = which_of(request)
        except DuemqError as error:  # of a later release
            log.warning("a bulk job of another shard is not known here: %s", error)

    async def _change(self, name: Name, *, held: bool) -> None:
        topic, prefix = name
        change = partial(
            changes.adopt, topic=topic, prefix=prefix, adopting=self._adopting, held=held
        )
        if await self._shard.change(change, makes_room=True):
            what = "held" if held else "not held any more"
            log.info("%s %s is %s, as at other shards", topic, prefix or "(all)", what)

    async def _holds(
        self, shard: TimerShard, only_old: bool
    ) -> list[timer_holds_pb2.TimerHold] | DuemqError | None:
        """None: it is new."""
        to, address = self._others.channel(shard), shard.address
        try:
            if only_old:
                stats = stubs.TimerStub(to).GetStats(_ASK_STATS, timeout=TIMEOUT_S)
                if not (await status.answer(stats, address)).accepted:
                    return None
            stub = stubs.TimerHoldsStub(to)
            request = timer_holds_pb2.ListTimerHoldsRequest(jobs=True)
            call = stub.ListTimerHolds(request, timeout=TIMEOUT_S)
            answer = await status.answer(call, address)
        except DuemqError as error:
            return error
        for job in answer.jobs:
            self._note_job(job)
        return list(answer.holds)
