"""What is set per consumer group: how often, and when, what it sends back comes again.  Pure.

Owned by: Tables.  Mutated by: the event loop.

A group need not be put to exist: without settings of its own the broker's are in force.  Changes
are entries of the commit log (journal.py), answered when durable.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from duemq.errors import GroupNotFound, InvalidArgument, Overloaded
from duemq_server.broker.records import due_times, names

GROUPS_MAX = 10_000
RETRIES_MAX = 1_000
DELAYS_MAX = 256
DELAY_MS_MAX = 366 * 86_400_000
MULTIPLIER_MAX = 100.0

DEFAULT_RETRIES = 16
# Sixteen retries: with the first delivery seventeen, the last 4 h 46 min after the first.
DEFAULT_DELAYS = "10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


@dataclass(frozen=True, slots=True)
class ExponentialDelays:
    """`initial_ms * multiplier ^ (retry - 1)`, but `max_ms` at most."""

    initial_ms: int
    multiplier: float
    max_ms: int

    def delay_ms(self, retry: int) -> int:
        """The delay before a retry, the first of which is 1."""
        try:
            delay = self.initial_ms * self.multiplier ** (retry - 1)
        except OverflowError:
            return self.max_ms
        return int(min(delay, self.max_ms))


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`retries_max`: deliveries after the first; None: the broker's.

    The delays are a table, the last one for all retries beyond it, or exponential; with neither the
    broker's table is in force.
    """

    retries_max: int | None = None
    delays_ms: tuple[int, ...] = ()
    exponential: ExponentialDelays | None = None

    def check(self) -> None:
        """Raises InvalidArgument naming field, value and limit."""
        if self.retries_max is not None:
            _check_range("retries_max", self.retries_max, 0, RETRIES_MAX)
        if self.delays_ms and self.exponential:
            raise _illegal("exponential", "given with delays_ms", "a table or exponential delays")
        if len(self.delays_ms) > DELAYS_MAX:
            raise _illegal("delays_ms", f"{len(self.delays_ms)} delays", f"at most {DELAYS_MAX}")
        for delay_ms in self.delays_ms:
            _check_range("delays_ms", delay_ms, 0, DELAY_MS_MAX)
        if self.exponential:
            initial_ms, multiplier = self.exponential.initial_ms, self.exponential.multiplier
            _check_range("initial_ms", initial_ms, 1, DELAY_MS_MAX)
            if not (math.isfinite(multiplier) and 1 <= multiplier <= MULTIPLIER_MAX):
                raise _illegal("multiplier", multiplier, f"1 to {MULTIPLIER_MAX:g}")
            _check_range("max_ms", self.exponential.max_ms, initial_ms, DELAY_MS_MAX)

    def over(self, defaults: "RetryPolicy") -> "RetryPolicy":
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


DEFAULT_POLICY = RetryPolicy(DEFAULT_RETRIES, due_times.parse_levels(DEFAULT_DELAYS))


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The settings of one group."""

    group: str
    retry: RetryPolicy = RetryPolicy()


class GroupConfigs:
    """The groups that were put, by name."""

    def __init__(self, defaults: RetryPolicy, groups_max: int = GROUPS_MAX) -> None:
        self.defaults = defaults
        """The broker's own."""
        self._groups_max = groups_max
        self._configs: dict[str, GroupConfig] = {}

    def __contains__(self, group: str) -> bool:
        return group in self._configs

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def effective(self, group: str) -> GroupConfig:
        """What is in force for a group, also for one that was never put."""
        config = self._configs.get(group)
        return GroupConfig(group, config.retry.over(self.defaults) if config else self.defaults)

    def check(self, config: GroupConfig) -> None:
        """Raises InvalidArgument, and Overloaded when there is no room for another group."""
        names.check_own_group(config.group)
        config.retry.check()
        if config.group not in self._configs and len(self._configs) >= self._groups_max:
            raise Overloaded(
                f"group: {len(self._configs)} groups have settings here, the most allowed",
                field="group",
                value=config.group,
                limit=self._groups_max,
            )

    def put(self, config: GroupConfig) -> None:
        """Makes it so; the caller has checked it."""
        self._configs[config.group] = config

    def remove(self, group: str) -> None:
        """Forgets a group's settings, if there are any."""
        self._configs.pop(group, None)

    def encode(self) -> list[dict[str, Any]]:
        """For the checkpoint: a row a group."""
        return [encode(config) for config in self._configs.values()]

    def load(self, rows: Iterable[dict[str, Any]]) -> None:
        """Puts back what `encode` gave."""
        self._configs = {row["group"]: decode(row) for row in rows}


def encode(config: GroupConfig) -> dict[str, Any]:
    """In plain types, as JSON has them."""
    row = asdict(config)
    row["retry"]["delays_ms"] = list(config.retry.delays_ms)
    return row


def decode(row: dict[str, Any]) -> GroupConfig:
    """What `encode` gave."""
    retry = row["retry"]
    exponential = retry["exponential"]
    return GroupConfig(
        row["group"],
        RetryPolicy(
            retry["retries_max"],
            tuple(retry["delays_ms"]),
            ExponentialDelays(**exponential) if exponential else None,
        ),
    )


def not_found(group: str) -> GroupNotFound:
    """The error for a group that must be made first."""
    return GroupNotFound(
        f"group: {group!r} is not here, and auto_create_groups is off: put it first",
        field="group",
        value=group,
    )


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise _illegal(field, value, f"{low} to {high}")


def _illegal(field: str, value: object, limit: str) -> InvalidArgument:
    return InvalidArgument(
        f"{field}: {value} is not allowed: {limit}", field=field, value=value, limit=limit
    )
