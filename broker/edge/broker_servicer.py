"""The service Broker: from protobuf to one call and back."""

from collections.abc import AsyncIterator
from typing import Any

from duemq.protocol import checks
from duemq.protocol.route import STORE_ID
from duemq.v1 import broker_pb2, view_pb2
from duemq_server.broker.edge.offset_requests import OffsetRequests
from duemq_server.broker.edge.pull_requests import PullRequests
from duemq_server.broker.edge.send_back_requests import SendBackRequests
from duemq_server.broker.edge.send_requests import SendRequests
from duemq_server.broker.edge.timer_admin_servicer import TimerAdminServicer
from duemq_server.serving.methods import Codec

STORE_ID_DIGITS_MAX = 20
SERVICE = broker_pb2.DESCRIPTOR.services_by_name["Broker"]

_SEND: Codec = (
    view_pb2.SendRequestView.FromString,
    view_pb2.SendResponseView.SerializeToString,
)
_PULL: Codec = (broker_pb2.PullRequest.FromString, bytes)
_FETCH: Codec = (broker_pb2.FetchFramesRequest.FromString, bytes)
OVERRIDES = {
    "Send": _SEND,
    "SendStream": _SEND,
    "Pull": _PULL,
    "PullStream": _PULL,
    "FetchFrames": _FETCH,
}


class OnlyMeant:
    """A servicer, which gets no calls that are meant for another broker."""

    def __init__(self, servicer: object, timers: TimerAdminServicer) -> None:
        self._servicer = servicer
        self._timers = timers

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._servicer, name)

        async def checked(request: Any, context: Any) -> Any:
            self._check(context)
            return await method(request, context)

        return checked

    def _check(self, context: Any) -> None:
        """Raises Unavailable, InvalidArgument."""
        for name, value in context.invocation_metadata() or ():
            if name == STORE_ID:
                if not (value.isdecimal() and len(value) <= STORE_ID_DIGITS_MAX):
                    raise checks.wrong(STORE_ID, value, "a store id: 64 bits, in decimal")
                self._timers.check_meant(int(value))


class BrokerServicer:
    """See protos/duemq/v1/broker.proto."""

    def __init__(
        self,
        sends: SendRequests,
        pulls: PullRequests,
        offsets: OffsetRequests,
        send_backs: SendBackRequests,
        timers: TimerAdminServicer,
    ) -> None:
        self._sends = sends
        self._pulls = pulls
        self._offsets = offsets
        self._send_backs = send_backs
        self._timers = timers

    async def Send(self, request: view_pb2.SendRequestView, _: Any) -> view_pb2.SendResponseView:
        """Stores batches."""
        return await self._sends.send(request)

    async def SendStream(
        self, requests: AsyncIterator[view_pb2.SendRequestView], context: Any
    ) -> None:
        """Stores batches of many requests."""
        await self._sends.stream(requests, context.write)

    async def Pull(self, request: broker_pb2.PullRequest, context: Any) -> bytes:
        """Reads records."""
        return await self._pulls.pull(request, context)

    async def PullStream(
        self, requests: AsyncIterator[broker_pb2.PullRequest], context: Any
    ) -> None:
        """Reads records for many requests."""
        await self._pulls.stream(requests, context.write, context.peer())

    async def FetchFrames(self, request: broker_pb2.FetchFramesRequest, context: Any) -> bytes:
        """Reads whole frames."""
        self._timers.check_fetch(request)
        return await self._pulls.fetch(request, context)

    async def ClaimTimerQueues(
        self, request: broker_pb2.ClaimTimerQueuesRequest, _: Any
    ) -> broker_pb2.ClaimTimerQueuesResponse:
        """Takes queues of %TIMER% over for a timer service."""
        return await self._timers.claim(request)

    async def AcquireQueues(
        self, request: broker_pb2.AcquireQueuesRequest, _: Any
    ) -> broker_pb2.AcquireQueuesResponse:
        """Takes queues over for a member of a group."""
        return broker_pb2.AcquireQueuesResponse(queues=await self._offsets.acquire(request))

    async def CommitOffsets(
        self, request: broker_pb2.CommitOffsetsRequest, _: Any
    ) -> broker_pb2.CommitOffsetsResponse:
        """Stores how far a group is."""
        self._timers.check_meant(request.store_id)
        results = await self._offsets.commit(request.group, request.commits, request.timer_id)
        return broker_pb2.CommitOffsetsResponse(queues=results)

    async def GetOffsets(
        self, request: broker_pb2.GetOffsetsRequest, _: Any
    ) -> broker_pb2.GetOffsetsResponse:
        """Where a group is."""
        results = self._offsets.committed(request.group, request.topic)
        return broker_pb2.GetOffsetsResponse(queues=results)

    async def SendBack(
        self, request: broker_pb2.SendBackRequest, _: Any
    ) -> broker_pb2.SendBackResponse:
        """Takes back what a group could not process."""
        return await self._send_backs.send_back(request)
