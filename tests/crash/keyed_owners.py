"""Owners of timer keys under kill -9: each knows of every message what must become of it.

An owner has keys of its own and asks about one after the other, so that each answer tells what is
true: a send that replaced something, what it was; one that did not, that the message before fired.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from duemq import CancelOutcome, RescheduleOutcome
from duemq.aio import Producer
from duemq.errors import TimerExists
from tests.crash.timer_cluster import TOPIC, TimerCluster

KEYS = 3  # of an owner
DELAYS_MS = (0, 20, 200, 1_000, 3_000, 3_600_000)
FIRED, GONE, WAITS = "fired", "gone", "waits"


class Owner:
    """Sends, replaces, reschedules and cancels under its keys."""

    def __init__(self, name: str, producer: Producer, random: Random) -> None:
        self.fates: dict[bytes, str] = {}
        """Of each message that was stored."""
        self.stored = self.cancelled = self.replaced = 0
        self._name = name
        self._producer = producer
        self._random = random
        self._waiting: dict[str, tuple[bytes, str]] = {}  # key → (body, handle), as far as is known

    async def work(self, steps: int) -> None:
        for step in range(steps):
            key = f"{self._name}-{self._random.randrange(KEYS)}"
            act = self._random.choice((self._send, self._send, self._keep, self._move, self._drop))
            await act(key, f"{key}-{step}".encode())
            await asyncio.sleep(self._random.uniform(0, 0.03))

    async def hurry(self) -> None:
        """What still waits is due now."""
        for key in list(self._waiting):
            await self._move(key, b"", delay_ms=0)

    def _delay(self) -> float:
        return self._random.choice(DELAYS_MS) / 1_000

    async def _send(self, key: str, body: bytes) -> None:
        before = self._waiting.get(key)
        receipt = await self._producer.send(TOPIC, body, timer_key=key, delay=self._delay())
        assert receipt.handle is not None
        if receipt.replaced is not None:
            assert before is not None
            assert receipt.replaced == before[1], (key, body, before)
            self.fates[before[0]] = GONE
            self.replaced += 1
        elif before is not None:
            self.fates[before[0]] = FIRED
        self._now_waits(key, body, receipt.handle)

    async def _keep(self, key: str, body: bytes) -> None:
        before = self._waiting.get(key)
        refused: TimerExists | None = None
        try:
            receipt = await self._producer.send(
                TOPIC, body, timer_key=key, delay=self._delay(), if_absent=True
            )
        except TimerExists as error:
            refused = error
        if refused is not None:
            assert before is not None
            assert refused.handle == before[1], (key, body, before)
            return
        assert receipt.replaced is None
        assert receipt.handle is not None
        if before is not None:
            self.fates[before[0]] = FIRED
        self._now_waits(key, body, receipt.handle)

    def _now_waits(self, key: str, body: bytes, handle: str) -> None:
        self.stored += 1
        self.fates[body] = WAITS
        self._waiting[key] = body, handle

    async def _move(self, key: str, _: bytes, delay_ms: int | None = None) -> None:
        before = self._waiting.get(key)
        by_key = before is None or self._random.random() < 0.5
        delay = self._delay() if delay_ms is None else delay_ms / 1_000
        if by_key:
            answer = await self._producer.reschedule(key=(TOPIC, key), delay=delay)
        else:
            assert before is not None
            answer = await self._producer.reschedule(before[1], delay=delay)
        if answer.outcome is RescheduleOutcome.RESCHEDULED:
            assert before is not None
            assert answer.handle is not None
            self._waiting[key] = before[0], answer.handle
            self.stored += 1
            self.replaced += 1
        elif before is not None:
            self._fired(key, before[0])

    async def _drop(self, key: str, _: bytes) -> None:
        before = self._waiting.get(key)
        by_handle = before is not None and self._random.random() < 0.3
        if by_handle and before is not None:
            outcome = await self._producer.cancel(before[1])
        else:
            outcome = await self._producer.cancel(key=(TOPIC, key))
        if before is None:
            return
        if outcome is CancelOutcome.CANCELLED:
            self.fates[before[0]] = GONE
            self.cancelled += 1
            del self._waiting[key]
        else:
            self._fired(key, before[0])

    def _fired(self, key: str, body: bytes) -> None:
        self.fates[body] = FIRED
        del self._waiting[key]


async def check_end(cluster: TimerCluster, owners: list[Owner]) -> None:
    """Each message is delivered once or never, as its owner was told; the ledger agrees."""
    stats = await cluster.settled()
    fates = {body: fate for owner in owners for body, fate in owner.fates.items()}
    found, early = await cluster.all_delivered(stats)
    assert early == []
    wanted = Counter({body: 1 for body, fate in fates.items() if fate != GONE})
    assert found == wanted, (found - wanted, wanted - found)
    assert stats.cancelled == sum(owner.cancelled for owner in owners)
    assert stats.replaced == sum(owner.replaced for owner in owners)
    assert stats.accepted == sum(owner.stored for owner in owners)
    assert stats.accepted == stats.fired + stats.cancelled + stats.replaced
