"""The service that replicas and operators call (protos/replication); pure translation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from duemq_server.replication.protocol.record import MemberChange
from duemq_server.replication.running import wire
from duemq_server.replication.running.leading import Leading
from duemq_server.replication.running.v1 import replication_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Replication"]


class AskedReplica(Protocol):
    """The replica that is asked."""

    @property
    def leading(self) -> Leading | None:
        """Its term, while it leads or prepares to."""
        ...

    def why_not(self) -> str:
        """Why it does not lead, for who would follow."""
        ...

    async def send_snapshot(
        self,
        request: pb.GetSnapshotRequest,
        write: Callable[[pb.SnapshotPart], Awaitable[None]],
    ) -> None:
        """Raises Unavailable, ReadOnly, CorruptFile."""
        ...

    def status(self) -> pb.ReplicaStatus:
        """What it is and knows."""
        ...

    async def hand_over(self, to: str) -> pb.HandOverResponse:
        """Raises Unavailable, InvalidArgument, Timeout."""
        ...

    async def adopt(self, *, confirmed: bool, accept_loss: bool) -> str:
        """What was done, or would be.  Raises InvalidArgument, Unavailable.

        `accept_loss`: others may have more, and it is lost.
        """
        ...

    async def elect(self, *, confirmed: bool) -> str:
        """As `adopt`."""
        ...

    async def change_members(self, change: MemberChange, *, confirmed: bool) -> str:
        """As `adopt`; of a leader.  Raises Timeout, too."""
        ...


class ReplicationServicer:
    """See the module."""

    def __init__(self, member: AskedReplica) -> None:
        self._member = member

    async def Follow(self, requests: AsyncIterator[pb.FromFollower], context: Any) -> None:
        """A replica follows."""
        async for first in requests:
            hello = wire.hello(first)
            leading = self._member.leading
            if leading is None:
                await context.write(wire.not_leading(self._member.why_not()))
            else:
                await leading.serve(hello, first.hello.address, requests, context)
            return

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Any) -> None:
        """The leader's checkpoint, and what goes with it."""
        await self._member.send_snapshot(request, context.write)

    async def GetStatus(self, _request: pb.GetStatusRequest, _: Any) -> pb.ReplicaStatus:
        """What this replica is."""
        return self._member.status()

    async def HandOver(self, request: pb.HandOverRequest, _: Any) -> pb.HandOverResponse:
        """The leader lets another one lead."""
        return await self._member.hand_over(request.to)

    async def Adopt(self, request: pb.DecideRequest, _: Any) -> pb.Decided:
        """An operator says that this log is the group's."""
        text = await self._member.adopt(
            confirmed=request.confirmed, accept_loss=request.accept_loss
        )
        return pb.Decided(text=text, done=request.confirmed)

    async def Elect(self, request: pb.DecideRequest, _: Any) -> pb.Decided:
        """An operator accepts a loss."""
        text = await self._member.elect(confirmed=request.confirmed)
        return pb.Decided(text=text, done=request.confirmed)

    async def ChangeMembers(self, request: pb.ChangeMembersRequest, _: Any) -> pb.Decided:
        """The leader adds a member, or removes one."""
        change = wire.member_change(request)
        text = await self._member.change_members(change, confirmed=request.confirmed)
        return pb.Decided(text=text, done=request.confirmed)
