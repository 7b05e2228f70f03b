"""What an embedded cluster still lacks until it is usable, in words; nothing: it is.

A nameserver may list for a while who led before: whoever it says leads a group is asked itself.
All are asked where others reach them: a certificate is for that name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

import grpc

from duemq.settings import Tls
from duemq.transport.channel import connect_blocking
from duemq.v1 import nameserver_pb2 as pb
from duemq.v1 import stubs
from duemq_server.local_cluster.supervisor import ChildPlace, ClusterFailed
from duemq_server.replication.running.v1 import replication_pb2
from duemq_server.replication.running.v1.stubs import ReplicationStub

RPC_TIMEOUT_S = 2.0
LEADS = "leader"

Advertised = Callable[[ChildPlace], str]
_Instance = pb.BrokerInstance | pb.TimerInstance


def unregistered(
    nameserver: ChildPlace, expected: Sequence[ChildPlace], advertised: Advertised, tls: Tls | None
) -> str:
    """Who of `expected` does not serve, as far as a nameserver knows.

    Raises ClusterFailed where none of them ever will, for want of permissions.
    """
    lacking = _unregistered(nameserver, expected, advertised, tls)
    if lacking and tls is not None:
        _check_permitted(nameserver.name, advertised(nameserver), tls)
    return lacking


def _unregistered(
    nameserver: ChildPlace, expected: Sequence[ChildPlace], advertised: Advertised, tls: Tls | None
) -> str:
    try:
        cluster = _cluster(advertised(nameserver), tls)
    except grpc.RpcError as error:
        return f"{nameserver.name}: {_details(error)}"
    listed: list[_Instance] = [*cluster.brokers, *cluster.timers]
    present = {one.name: one for one in listed}
    missing = []
    for group, members in _groups(expected).items():
        one = present.get(group)
        if members[0].replica:
            missing += _lacking(group, members, one, advertised, tls)
        elif one is None or one.address != advertised(members[0]):
            missing.append(f"{group} not registered")
    return f"{', '.join(missing)} at {nameserver.name}" if missing else ""


def _check_permitted(name: str, address: str, tls: Tls) -> None:
    """Asks as members do, with their certificate, and for nothing."""
    with connect_blocking(address, tls) as connection:
        try:
            stubs.NameserverStub(connection).Register(pb.RegisterRequest(), timeout=RPC_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                raise ClusterFailed(
                    f"{name} refuses the members' own certificate, {tls.cert}:"
                    f" {_details(error)}: give a name of it `service = true`"
                ) from None


def leader_of(
    nameserver: ChildPlace,
    group: str,
    members: Iterable[ChildPlace],
    advertised: Advertised,
    tls: Tls | None,
) -> str:
    """The name of the member that leads the group; empty: none does, as far as is known."""
    try:
        cluster = _cluster(advertised(nameserver), tls)
    except grpc.RpcError:
        return ""
    listed: list[_Instance] = [*cluster.brokers, *cluster.timers]
    for one in listed:
        if one.name == group:
            for member in members:
                if advertised(member) == one.address and _leads(one.address, tls):
                    return member.name
    return ""


def _groups(members: Sequence[ChildPlace]) -> dict[str, list[ChildPlace]]:
    groups: dict[str, list[ChildPlace]] = {}
    for member in members:
        if member.kind != "nameserver":
            groups.setdefault(member.group, []).append(member)
    return groups


def _lacking(
    group: str,
    members: Sequence[ChildPlace],
    one: _Instance | None,
    advertised: Advertised,
    tls: Tls | None,
) -> list[str]:
    status = None
    if one is not None and one.address in map(advertised, members):
        status = _status(one.address, tls)
    if one is None or status is None or status.role != LEADS:
        return [f"{group} without a leader"]
    in_sync = {each.name for each in one.replicas if each.in_sync and each.role != pb.AWAY}
    awaited = _members(status, members) - in_sync
    return [f"{each.name} not in sync" for each in members if each.replica in awaited]


def _members(status: replication_pb2.ReplicaStatus, started: Iterable[ChildPlace]) -> set[str]:
    """By the group's record: an operator may have removed some that are started."""
    if status.record:
        return set(json.loads(status.record)["members"])
    return {each.replica for each in started}


def _leads(address: str, tls: Tls | None) -> bool:
    status = _status(address, tls)
    return status is not None and status.role == LEADS


def _status(address: str, tls: Tls | None) -> replication_pb2.ReplicaStatus | None:
    with connect_blocking(address, tls) as connection:
        stub = ReplicationStub(connection)
        request = replication_pb2.GetStatusRequest()
        try:
            return stub.GetStatus(request, timeout=RPC_TIMEOUT_S)
        except grpc.RpcError:
            return None


def _cluster(address: str, tls: Tls | None) -> pb.Cluster:
    with connect_blocking(address, tls) as connection:
        stub = stubs.NameserverStub(connection)
        return stub.GetCluster(pb.GetClusterRequest(), timeout=RPC_TIMEOUT_S)


def _details(error: grpc.RpcError) -> str:
    return str(error.details()) if isinstance(error, grpc.Call) else str(error)
