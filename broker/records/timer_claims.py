"""A timer service as brokers know it, what it has claimed, and what becomes of a claim.  Pure.

How they are written into the log: broker/store/journal.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, NamedTuple

from duemq.protocol import checks, timer_keys
from duemq.protocol.limits import SERVICE_IDS_FROM, SHARDS_MAX

NAME_CHARACTERS_MAX = 255
NOT_KNOWN = -1
"""Of `key_shards`, to a service that has not heard of it."""


@dataclass(frozen=True, slots=True)
class Service:
    """A timer service, by its data directory."""

    id: int
    name: str
    shard: int
    shards: int
    key_shards: int = 0
    """Shards that timer keys are divided over; 0: as many as `shards`."""
    empty: bool = False
    """It holds no timers, and is in a claim here without queues that keeps no keys."""

    def __str__(self) -> str:
        return f"{self.name} (shard {self.shard} of {self.shards}, id {self.id:016x})"

    def has(self, queue_id: int) -> bool:
        """Whether the queue is one of its shard's."""
        return timer_keys.shard_of_queue(queue_id, self.shards) == self.shard

    @property
    def keeps_keys(self) -> bool:
        """Whether its shard keeps timer keys and schedules: for good, whatever else it has."""
        return self.shard < (self.key_shards or self.shards)

    def encode(self) -> dict[str, Any]:
        """As releases before `key_shards` wrote it, as long as there is no difference.

        Without `empty`: the release before refuses a field that it does not know, and may have to
        read this, as a replica that is not upgraded yet or after going back.
        """
        fields = asdict(self)
        del fields["empty"]
        if not self.key_shards:
            del fields["key_shards"]
        return fields

    @staticmethod
    def decode(fields: Mapping[str, Any], empty: bool) -> "Service":
        """Of what `encode` gave; what a later release says of it is passed over."""
        known = {name: fields[name] for name in _SERVICE_FIELDS if name in fields}
        return Service(**{**known, "empty": empty or known.get("empty", False)})


_SERVICE_FIELDS = tuple(each.name for each in dataclass_fields(Service))


@dataclass(frozen=True, slots=True)
class Claim:
    """Queues that a service has claimed, and when (Unix time in ms)."""

    service: Service
    queues: tuple[int, ...]
    since_ms: int
    released: bool = False
    epoch: int = 0
    """In which the replica led that claimed last; 0: the service has none."""

    @property
    def holds(self) -> bool:
        """Whether there may be timers that only this service has."""
        return not (self.released or self.service.empty)


@dataclass(slots=True)
class Claimant:
    """Who asked for anything since this broker started, and when by a clock that nobody sets."""

    seen_ms: int
    waits: bool = False
    """For queues that another shard has."""
    epoch: int = 0
    """In which it leads its replicas; 0: it has none."""


class Decision(NamedTuple):
    """What becomes of a claim."""

    service: Service
    granted: tuple[int, ...]
    waits: Mapping[int, Service]
    """Owners of the other queues, which have not handed them over."""
    leaves: tuple[int, ...]
    """Queues that the service hands over."""
    changes: bool
    """Whether it owns other queues then, or says other things of itself."""
    leads_anew: bool
    """Whether its epoch is another one than the log says."""


def check(service: Service, queues: tuple[int, ...]) -> None:
    """Raises InvalidArgument for what no timer service can be, or claim."""
    checks.at_least("service.id", service.id, SERVICE_IDS_FROM)
    checks.length("service.name", service.name, 1, NAME_CHARACTERS_MAX)
    checks.between("service.shards", service.shards, 1, SHARDS_MAX)
    checks.between("service.shard", service.shard, 0, SHARDS_MAX - 1)
    checks.between("service.key_shards", service.key_shards, NOT_KNOWN, SHARDS_MAX)
    for queue_id in queues:
        if not service.has(queue_id):
            raise checks.wrong(
                "queue_ids",
                queue_id,
                f"queues of shard {service.shard} of {service.shards}; this one is of shard"
                f" {timer_keys.shard_of_queue(queue_id, service.shards)}",
            )
