"""Calls to nameservers and replicas, one after the other or side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from duemq.errors import DuemqError, InvalidArgument, Rejected, Unavailable
from duemq.settings import Tls, nameservers_of
from duemq.transport import channel, status
from duemq.v1 import nameserver_pb2, stubs
from duemq_server.operating import groups
from duemq_server.operating.groups import Replica
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.running.v1.stubs import ReplicationStub

T = TypeVar("T")
Call = Callable[[ReplicationStub], Awaitable[T]]


class Asking:
    """Asks within `timeout_s` each.  Raises DuemqErrors."""

    def __init__(self, nameservers: str, timeout_s: float, tls: Tls | None) -> None:
        """`nameservers`: HOST[:PORT], comma-separated.  Raises InvalidArgument."""
        self._tls = tls
        self.nameservers = nameservers_of(nameservers)
        self.timeout_s = timeout_s

    def replica(self, target: str) -> Replica:
        """The replica that GROUP/NAME or HOST:PORT names."""
        if groups.is_address(target):
            return Replica("", "", target)
        group, name = groups.split(target)
        return groups.named(name, self.group(group))

    def group(self, target: str) -> list[Replica]:
        """All replicas of a group; of HOST:PORT the one that is there."""
        if groups.is_address(target):
            return [Replica("", "", target)]
        return groups.replicas_of(target, asyncio.run(self._clusters()))

    def leader(self, group: str) -> Replica:
        """Who leads the group, as the nameservers know; or HOST:PORT, which says itself whether it
        does.  Raises Unavailable if nobody does."""
        if groups.is_address(group):
            return Replica("", "", group)
        for each in self.group(group):
            if each.leads:
                return each
        raise Unavailable(f"{group}: nobody leads it now", field="group", value=group)

    def one(self, replica: Replica, call: Call[T]) -> T:
        """The answer of one replica."""
        return asyncio.run(_ask(replica, call, self._tls))

    def statuses(self, replicas: Sequence[Replica]) -> list[pb.ReplicaStatus | DuemqError]:
        """What each says of itself, or why it does not."""

        async def ask_all() -> list[pb.ReplicaStatus | DuemqError]:
            return await asyncio.gather(*map(self._status, replicas))

        return asyncio.run(ask_all())

    def others(self, replica: Replica) -> list[Replica]:
        """The rest of a replica's group; of one that is named by its address, if that is known.

        Raises InstanceNotFound, Unavailable.
        """
        group, name = replica.group, replica.name
        if not name:
            status = self.one(
                replica, lambda to: to.GetStatus(pb.GetStatusRequest(), timeout=self.timeout_s)
            )
            group, name = status.group, status.replica.name
        return [each for each in self.group(group) if each.name != name]

    async def _status(self, replica: Replica) -> pb.ReplicaStatus | DuemqError:
        request = pb.GetStatusRequest()
        try:
            if not replica.address:
                raise Unavailable(f"nobody knows where {replica} is")
            return await _ask(
                replica, lambda to: to.GetStatus(request, timeout=self.timeout_s), self._tls
            )
        except DuemqError as error:
            return error

    async def _clusters(self) -> list[nameserver_pb2.Cluster]:
        """What the nameservers within reach list.  Raises Unavailable if none is."""
        answers = await asyncio.gather(
            *map(self._cluster, self.nameservers), return_exceptions=True
        )
        clusters = [each for each in answers if isinstance(each, nameserver_pb2.Cluster)]
        for error in answers:
            if isinstance(error, BaseException) and (
                not clusters or not isinstance(error, DuemqError)
            ):
                raise error
        return clusters

    async def _cluster(self, address: str) -> nameserver_pb2.Cluster:
        async with channel.connect(address, self._tls) as connection:
            stub = stubs.NameserverStub(connection)
            request = nameserver_pb2.GetClusterRequest()
            return await status.answer(stub.GetCluster(request, timeout=self.timeout_s), address)


async def _ask(replica: Replica, call: Call[T], tls: Tls | None) -> T:
    async with channel.connect(replica.address, tls) as connection:
        try:
            return await status.answer(call(ReplicationStub(connection)), replica.address)
        except Rejected as error:
            if not isinstance(error.__cause__, grpc.RpcError):
                raise
            if error.__cause__.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            raise InvalidArgument(
                f"{replica.address} is no replica, or of a release that cannot do this",
                field="replica",
                value=replica.address,
            ) from error
