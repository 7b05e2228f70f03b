"""Brokers that new messages avoid for a while: RocketMQ 5's latency fault tolerance.  Pure.

A slow answer or a failure keeps messages without an ordering key away from a broker for the time
in the table.  It is advice only: where every broker is avoided, none is.  Keyed messages stay.
One that goes on refusing is sent nothing at all for a while.
"""

from collections.abc import Callable
from typing import Protocol

# (an answer that took at least this long, keeps messages away this long), in ms.
AVOIDANCE_MS = (
    (15_000, 30_000),
    (5_000, 10_000),
    (3_000, 6_000),
    (1_800, 5_000),
    (550, 2_000),
)
# What a failure counts as.
FAILURE_MS = 10_000


def avoidance_ms(answer_ms: float) -> int:
    """How long a broker is avoided whose answer took `answer_ms`."""
    return next((avoid for at_least, avoid in AVOIDANCE_MS if answer_ms >= at_least), 0)


class Health:
    """Of the brokers that one producer sends to."""

    def __init__(self) -> None:
        self._avoided_until_ms: dict[str, float] = {}

    def answered(self, broker: str, answer_ms: float, now_ms: float) -> None:
        """A request was answered; a fast answer ends an avoidance."""
        avoid = avoidance_ms(answer_ms)
        if avoid:
            self._avoided_until_ms[broker] = now_ms + avoid
        else:
            self._avoided_until_ms.pop(broker, None)

    def failed(self, broker: str, now_ms: float) -> None:
        """A connection or a request failed."""
        self._avoided_until_ms[broker] = now_ms + avoidance_ms(FAILURE_MS)

    def available(self, broker: str, now_ms: float) -> bool:
        """Whether new messages may go there."""
        until = self._avoided_until_ms.get(broker)
        return until is None or now_ms >= until

    def avoided(self, now_ms: float) -> dict[str, float]:
        """The brokers avoided and until when."""
        return {b: until for b, until in self._avoided_until_ms.items() if now_ms < until}


class Waits(Protocol):
    """How long a broker is left in peace that goes on refusing."""

    def next_s(self) -> float:
        """Counts a refusal."""
        ...


class Patience:
    """With brokers that refuse."""

    def __init__(self, waits: Callable[[], Waits]) -> None:
        """`waits`: made for each broker that refuses."""
        self._make = waits
        self._refusing: dict[str, Waits] = {}

    def wait_ms(self, broker: str) -> float:
        """How long it is sent nothing, after one more refusal."""
        if broker not in self._refusing:
            self._refusing[broker] = self._make()
        return self._refusing[broker].next_s() * 1000

    def over(self, broker: str) -> None:
        """It takes something again."""
        self._refusing.pop(broker, None)
