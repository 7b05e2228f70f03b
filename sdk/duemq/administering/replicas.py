"""Replicas of brokers and timer shards, as nameservers list them.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from duemq.descriptions import ReplicaDescription
from duemq.v1 import nameserver_pb2

Instance = nameserver_pb2.BrokerInstance | nameserver_pb2.TimerInstance


class Replicas(NamedTuple):
    """By the name of the broker or timer shard, those that are lost among them."""

    of_brokers: dict[str, tuple[ReplicaDescription, ...]]
    of_timers: dict[str, tuple[ReplicaDescription, ...]]


def replicas_in(clusters: Iterable[nameserver_pb2.Cluster]) -> Replicas:
    """The replicas of all that several nameservers list: each as who heard of it last says."""
    clusters = list(clusters)
    return Replicas(
        _newest(one for each in clusters for one in (*each.brokers, *each.lost_brokers)),
        _newest(one for each in clusters for one in (*each.timers, *each.lost_timers)),
    )


def _newest(instances: Iterable[Instance]) -> dict[str, tuple[ReplicaDescription, ...]]:
    newest: dict[str, Instance] = {}
    for one in instances:
        known = newest.get(one.name)
        if known is None or _age(known) < _age(one):
            newest[one.name] = one
    return {name: tuple(map(_replica, one.replicas)) for name, one in newest.items()}


def _age(one: Instance) -> tuple[int, int, int]:
    return one.version.epoch, one.version.counter, one.last_heard_ms


def _replica(one: nameserver_pb2.ReplicaReport) -> ReplicaDescription:
    return ReplicaDescription(
        one.name,
        _role(one.role),
        one.in_sync,
        one.epoch,
        lag_bytes=one.lag_bytes,
        lag_s=one.lag_s,
        address=one.address,
        since_ms=one.since_ms,
        reason=one.reason,
    )


def _role(role: int) -> str:
    try:
        return nameserver_pb2.ReplicaRole.Name(role).lower()
    except ValueError:  # of a newer release
        return f"role {role}"
