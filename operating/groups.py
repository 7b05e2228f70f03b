"""Where the replicas of a group are, as the nameservers know them.  Pure.

A group that nobody leads is known by what its last leader said, until the nameservers forget it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from duemq.errors import InstanceNotFound, InvalidArgument
from duemq.v1 import nameserver_pb2 as pb

_Instance = pb.BrokerInstance | pb.TimerInstance


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica, and where it is asked."""

    group: str
    name: str
    address: str
    leads: bool = False
    """As the group's leader said last."""

    def __str__(self) -> str:
        return f"{self.group}/{self.name}" if self.name else self.address


def is_address(target: str) -> bool:
    """Whether it is HOST:PORT, and not a name."""
    return ":" in target


def replicas_of(group: str, clusters: Iterable[pb.Cluster]) -> list[Replica]:
    """All of a broker or timer shard, sorted.  Raises InstanceNotFound."""
    newest: _Instance | None = None
    for one in _listed(clusters):
        if one.name == group and (newest is None or _age(newest) < _age(one)):
            newest = one
    if newest is None:
        raise InstanceNotFound(
            f"no nameserver knows {group!r}; a replica can be named by its HOST:PORT, too",
            field="group",
            value=group,
        )
    if not newest.replicas:
        raise InstanceNotFound(f"{group} has no replicas", field="group", value=group)
    return [Replica(group, one.name, one.address, one.role == pb.LEADER) for one in newest.replicas]


def split(target: str) -> tuple[str, str]:
    """Group and name of GROUP/NAME.  Raises InvalidArgument."""
    group, slash, name = target.rpartition("/")
    if not (slash and group and name):
        raise InvalidArgument(
            f"{target!r} names no replica: say GROUP/NAME",
            field="replica",
            value=target,
            limit="GROUP/NAME",
        )
    return group, name


def named(name: str, replicas: Iterable[Replica]) -> Replica:
    """The one of that name, with an address.  Raises InstanceNotFound."""
    replicas = list(replicas)
    for each in replicas:
        if each.name == name:
            if not each.address:
                raise InstanceNotFound(
                    f"nobody knows where {each} is: say its HOST:PORT instead",
                    field="replica",
                    value=str(each),
                )
            return each
    names = ", ".join(each.name for each in replicas)
    raise InstanceNotFound(
        f"{replicas[0].group} has no replica {name!r}, but {names}", field="replica", value=name
    )


def _listed(clusters: Iterable[pb.Cluster]) -> Iterator[_Instance]:
    for cluster in clusters:
        yield from cluster.brokers
        yield from cluster.timers
        yield from cluster.lost_brokers
        yield from cluster.lost_timers


def _age(one: _Instance) -> tuple[int, int, int]:
    return one.version.epoch, one.version.counter, one.last_heard_ms
