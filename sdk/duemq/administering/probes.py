"""What runs in the cluster, asked of each process by itself.  Who does not answer is listed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from duemq.administering.asking import Method
from duemq.administering.timer_shards import TimerShards
from duemq.descriptions import (
    BrokerDescription,
    ClusterDescription,
    NameserverDescription,
    ReplicaDescription,
    StuckTimers,
    TimerStats,
)
from duemq.errors import DuemqError
from duemq.protocol.route import Broker, TimerShard
from duemq.v1 import admin_pb2, nameserver_pb2, stubs, timer_pb2

# To a server that may be dead, where the others' answers are worth showing without it.
TIMEOUT_S = 2.0

T = TypeVar("T")

Instance = nameserver_pb2.BrokerInstance | nameserver_pb2.TimerInstance


class ReplicasByName(NamedTuple):
    """By the name of the broker or timer shard, those that are lost among them."""

    of_brokers: dict[str, tuple[ReplicaDescription, ...]]
    of_timers: dict[str, tuple[ReplicaDescription, ...]]


class Probes(TimerShards):
    """What the admin client asks of nameservers, brokers and timer shards."""

    async def cluster(self) -> ClusterDescription:
        """What runs.  Who does not answer is listed with the error."""
        answers, brokers, shards = await asyncio.gather(
            asyncio.gather(*map(self._nameserver, self._client.nameservers)),
            asyncio.gather(*map(self._broker, self._client.routes.brokers)),
            self.timer_stats(),
        )
        replicas = replicas_in(cluster for _, cluster in answers if cluster is not None)
        found = _with_replicas((*brokers, *self._lost_brokers()), shards, replicas)
        return ClusterDescription(tuple(nameserver for nameserver, _ in answers), *found)

    def _lost_brokers(self) -> Iterator[BrokerDescription]:
        why = {each.name: each.error for each in self._client.missing}
        for lost in self._client.routes.lost_brokers:
            broker = lost.broker
            yield BrokerDescription(
                broker.name,
                broker.address,
                why[broker.name],
                store_id=broker.store_id,
                lost_ms=lost.since_ms,
            )

    async def timer_stats(self) -> list[TimerStats]:
        """The timer shards, sorted.  One that does not answer, or is missing, has an error."""
        alive = self._client.routes.timers
        found = list(await asyncio.gather(*map(self._timer, alive)))
        found += await self._missing_shards(alive)
        return sorted(found, key=lambda timer: timer.shard)

    async def _probe(self, address: str, method: Method[T]) -> T | DuemqError:
        """Its answer, or why there is none."""
        try:
            return await self._client.once(address, method, TIMEOUT_S)
        except DuemqError as error:
            return error

    async def _nameserver(
        self, address: str
    ) -> tuple[NameserverDescription, nameserver_pb2.Cluster | None]:
        ask = stubs.NameserverStub.ask("GetCluster", nameserver_pb2.GetClusterRequest())
        found = await self._probe(address, ask)
        if isinstance(found, DuemqError):
            return NameserverDescription(address, str(found)), None
        return NameserverDescription(address, None), found

    async def _broker(self, broker: Broker) -> BrokerDescription:
        ask = stubs.BrokerAdminStub.ask("DescribeBroker", admin_pb2.DescribeBrokerRequest())
        found = await self._probe(broker.address, ask)
        if isinstance(found, DuemqError):
            return BrokerDescription(broker.name, broker.address, str(found))
        return BrokerDescription(
            broker.name,
            broker.address,
            None,
            version=found.version,
            started_ms=found.started_ms,
            store_id=found.store_id,
            read_only=found.read_only,
            log_start_position=found.log_start_position,
            log_durable_position=found.log_durable_position,
            checkpoint_position=found.checkpoint_position,
            delay_levels_ms=tuple(found.delay_levels_ms),
        )

    async def _timer(self, timer: TimerShard) -> TimerStats:
        where = (timer.name, timer.address, timer.shard, timer.shards)
        ask = stubs.TimerStub.ask("GetStats", timer_pb2.GetStatsRequest())
        found = await self._probe(timer.address, ask)
        if isinstance(found, DuemqError):
            return TimerStats(*where, str(found))
        return TimerStats(
            *where,
            None,
            accepted=found.accepted,
            pending=found.pending,
            fired=found.fired,
            cancelled=found.cancelled,
            in_flight=found.in_flight,
            near=found.near,
            next_due_ms=found.next_due_ms or None,
            lateness_p50_ms=found.lateness_p50_ms,
            lateness_p99_ms=found.lateness_p99_ms,
            lateness_max_ms=found.lateness_max_ms,
            problems=tuple(found.problems),
            lost=found.lost,
            replaced=found.replaced,
            dropped=found.dropped,
            stuck=tuple(StuckTimers(each.topic, each.timers, each.reason) for each in found.stuck),
        )


def _with_replicas(
    brokers: Iterable[BrokerDescription], timers: Iterable[TimerStats], replicas: ReplicasByName
) -> tuple[tuple[BrokerDescription, ...], tuple[TimerStats, ...]]:
    """Both sorted, the brokers by name."""
    of_brokers, of_timers = replicas
    return (
        tuple(
            dataclasses.replace(each, replicas=of_brokers.get(each.name, ()))
            for each in sorted(brokers, key=lambda each: each.name)
        ),
        tuple(dataclasses.replace(each, replicas=of_timers.get(each.name, ())) for each in timers),
    )


def replicas_in(clusters: Iterable[nameserver_pb2.Cluster]) -> ReplicasByName:
    """The replicas of all that several nameservers list: each as who heard of it last says."""
    clusters = list(clusters)
    return ReplicasByName(
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
