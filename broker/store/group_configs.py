"""What is set per consumer group: how often, and when, what it sends back comes again.  Pure.

Owned by: Tables.  Mutated by: the event loop.

A group need not be put to exist: without settings of its own the broker's are in force.  Changes
are entries of the commit log (journal.py), answered when durable.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from duemq.errors import GroupNotFound, Overloaded
from duemq.protocol import names
from duemq.protocol.retry_policy import ExponentialDelays, RetryPolicy

GROUPS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The settings of one group."""

    group: str
    retry: RetryPolicy = field(default_factory=RetryPolicy)


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

    def freeze(self) -> Callable[[], list[dict[str, Any]]]:
        """What makes a row a group for the checkpoint, as of now; any thread may call it."""
        configs = list(self._configs.values())
        return lambda: [encode(config) for config in configs]

    def load(self, rows: Iterable[dict[str, Any]]) -> None:
        """Puts back what `freeze` gave."""
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
