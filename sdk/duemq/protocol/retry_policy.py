"""How often, and after which delays, what a group sends back comes again.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from duemq.protocol import checks, due
from duemq.protocol.due import LEVELS_MAX, parse_levels

if TYPE_CHECKING:
    from duemq.v1 import group_admin_pb2

RETRIES_MAX = 1_000
DELAYS_MAX = LEVELS_MAX
DELAY_MS_MAX = 366 * due.UNITS_MS["d"]
"""The longest that a retry may wait."""
MULTIPLIER_MAX = 100.0

DEFAULT_RETRIES = 16
# Sixteen retries: with the first delivery seventeen, the last 4 h 46 min after the first.
DEFAULT_DELAYS = "10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

Delay = float | timedelta | str
"""Seconds, a timedelta, or text as `250ms`, `5s`, `1h30m`."""


@dataclass(frozen=True, slots=True)
class ExponentialDelays:
    """`initial_ms * multiplier ^ (retry - 1)`, but `max_ms` at most."""

    initial_ms: int
    multiplier: float
    max_ms: int

    @classmethod
    def of(cls, initial: Delay, multiplier: float, longest: Delay) -> ExponentialDelays:
        """As callers write delays.  Raises InvalidArgument."""
        checks.number("multiplier", multiplier, 1, MULTIPLIER_MAX)
        return cls(due.delay_ms(initial, "initial"), multiplier, due.delay_ms(longest, "longest"))

    def check(self) -> None:
        """Raises InvalidArgument."""
        checks.between("initial_ms", self.initial_ms, 1, DELAY_MS_MAX)
        if not (math.isfinite(self.multiplier) and 1 <= self.multiplier <= MULTIPLIER_MAX):
            raise checks.wrong("multiplier", self.multiplier, f"1 to {MULTIPLIER_MAX:g}")
        checks.between("max_ms", self.max_ms, self.initial_ms, DELAY_MS_MAX)

    def delay_ms(self, retry: int) -> int:
        """The delay before a retry, the first of which is 1."""
        try:
            delay = self.initial_ms * self.multiplier ** (retry - 1)
        except OverflowError:
            return self.max_ms
        return int(min(delay, self.max_ms))


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What is None or empty is as the brokers are set."""

    retries_max: int | None = None
    """Deliveries after the first; a message that fails after them is a dead letter."""
    delays_ms: tuple[int, ...] = ()
    """Before each retry, the last one for all beyond."""
    exponential: ExponentialDelays | None = None
    """In place of a table."""

    def check(self) -> None:
        """Raises InvalidArgument naming field, value and limit."""
        if self.retries_max is not None:
            checks.between("retries_max", self.retries_max, 0, RETRIES_MAX)
        checks.at_most_one(delays_ms=self.delays_ms or None, exponential=self.exponential)
        checks.count("delays_ms", len(self.delays_ms), 0, DELAYS_MAX, "delays")
        for delay_ms in self.delays_ms:
            checks.between("delays_ms", delay_ms, 0, DELAY_MS_MAX)
        if self.exponential:
            self.exponential.check()

    @classmethod
    def received(cls, wire: group_admin_pb2.RetryPolicy) -> RetryPolicy:
        """As it was sent.  `check` says what of it may not be."""
        exponential = None
        if wire.HasField("exponential"):
            sent = wire.exponential
            exponential = ExponentialDelays(sent.initial_ms, sent.multiplier, sent.max_ms)
        retries_max = wire.retries_max if wire.HasField("retries_max") else None
        return cls(retries_max, tuple(wire.delays_ms), exponential)

    def write(self, wire: group_admin_pb2.RetryPolicy) -> None:
        """As it is sent, into an empty one."""
        if self.retries_max is not None:
            wire.retries_max = self.retries_max
        wire.delays_ms.extend(self.delays_ms)
        if self.exponential is not None:
            wire.exponential.initial_ms = self.exponential.initial_ms
            wire.exponential.multiplier = self.exponential.multiplier
            wire.exponential.max_ms = self.exponential.max_ms

    def over(self, defaults: RetryPolicy) -> RetryPolicy:
        """With what `defaults` says where this says nothing."""
        own_delays = bool(self.delays_ms or self.exponential)
        return RetryPolicy(
            defaults.retries_max if self.retries_max is None else self.retries_max,
            self.delays_ms if own_delays else defaults.delays_ms,
            self.exponential if own_delays else defaults.exponential,
        )

    def delay_ms(self, retry: int) -> int:
        """The delay before a retry, the first of which is 1; of a policy that says everything."""
        if self.exponential:
            return self.exponential.delay_ms(retry)
        return self.delays_ms[min(retry, len(self.delays_ms)) - 1]


DEFAULT_POLICY = RetryPolicy(DEFAULT_RETRIES, parse_levels(DEFAULT_DELAYS))
"""As brokers are set by default."""


def policy_of(
    retries_max: int | None = None,
    retry_delays: Sequence[Delay] | str | None = None,
    exponential: ExponentialDelays | tuple[Delay, float, Delay] | None = None,
) -> RetryPolicy:
    """As callers write it; `retry_delays` may be one text, `"10s 30s 1m"`.

    Raises InvalidArgument.  Brokers check the delays.
    """
    if retries_max is not None:
        checks.whole("retries_max", retries_max, 0, RETRIES_MAX)
    checks.at_most_one(retry_delays=retry_delays, exponential=exponential)
    if isinstance(retry_delays, str):
        retry_delays = retry_delays.split()
    if retry_delays is not None and not isinstance(retry_delays, Sequence):
        raise checks.wrong("retry_delays", retry_delays, "a list of delays, or one text")
    if retry_delays is not None and not retry_delays:
        raise checks.wrong("retry_delays", "", "1 delay or more; None for the brokers' own")
    if isinstance(exponential, tuple) and len(exponential) == 3:
        exponential = ExponentialDelays.of(*exponential)
    elif exponential is not None and not isinstance(exponential, ExponentialDelays):
        raise checks.wrong("exponential", exponential, "(initial, multiplier, longest)")
    delays_ms = tuple(due.delay_ms(each, "retry_delays") for each in retry_delays or ())
    return RetryPolicy(retries_max, delays_ms, exponential)
