"""Questions to timer shards: to all of them, each with its own part, or to the one that knows.

A shard whose part is not in the answer is named, as brokers are in asking.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from duemq.administering.asking import SHOWN_WITHOUT_TIMEOUT_S, Method, T
from duemq.administering.timer_shards import TimerShards
from duemq.descriptions import TimerStats
from duemq.errors import Internal, MissingBroker, Timeout, Unavailable, Unsupported
from duemq.protocol.route import TimerShard
from duemq.transport import retrying, status


class AskingShards(TimerShards):
    """What the parts of the admin client stand on that ask timer shards."""

    async def _each_shard(
        self, method: Method[T], timeout_s: float = SHOWN_WITHOUT_TIMEOUT_S
    ) -> tuple[list[T], Sequence[MissingBroker]]:
        """The answers of the shards that are there, and the shards whose part is not in them."""
        alive, missing = await self._shards_there()
        asked = (self._ask_or_miss(shard, method, missing, timeout_s) for shard in alive)
        answers = await self._together(asked)
        found = [each for each in answers if each is not None]
        return found, sorted(missing, key=lambda each: each.name)

    async def _together(self, asked: Iterable[Awaitable[T]]) -> list[T]:
        """All the answers, in order."""
        return await asyncio.gather(*asked)

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def _shards_there(self) -> tuple[Sequence[TimerShard], list[MissingBroker]]:
        """Whom to ask, and who is missing."""
        alive = self._client.routes.timers
        lost = await self._missing_shards(alive)
        return alive, [MissingBroker(shard_name(each), each.error or "") for each in lost]

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
            missing.append(MissingBroker(shard_name(shard), str(error)))
            return None

    async def _at_shard(self, shard: int, method: Method[T]) -> T:
        """The answer of one shard, by its number.  Raises DuemqErrors."""
        return await self._ask(
            lambda: self._client.timer_shard(shard).address, method, self._asker.timeout_s
        )

    async def _ask(self, address: Callable[[], str], method: Method[T], timeout_s: float) -> T:
        """Asked again while a shard has no leader, say: each question may be repeated."""

        async def attempt(left_s: float) -> T:
            asked = address()
            return await status.answer(method(self._client.channel(asked), left_s), asked)

        deadline = time.monotonic() + min(timeout_s, self._asker.timeout_s)
        return await retrying.until(deadline, attempt)

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
