"""The Nameserver service of the external port, whose clients cannot reach inside addresses."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from duemq.errors import PermissionDenied
from duemq.v1 import nameserver_pb2 as pb
from duemq_server.nameserver.edge.answers import Answers
from duemq_server.nameserver.edge.servicer import NameserverServicer
from duemq_server.nameserver.outside import OutsideView
from duemq_server.nameserver.registry import Registry


class OutsideServicer:
    """As NameserverServicer, which counts the watchers of both, wakes them and ends them."""

    def __init__(self, registry: Registry, inside: NameserverServicer) -> None:
        self._inside = inside
        self._answers = Answers(OutsideView(registry))

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """Refused: what registers here would be told to those inside."""
        raise _not_here()

    async def Deregister(
        self, request: pb.DeregisterRequest, context: Any
    ) -> pb.DeregisterResponse:
        """Refused, too."""
        raise _not_here()

    async def Forget(self, request: pb.ForgetRequest, context: Any) -> pb.ForgetResponse:
        """See nameserver.proto."""
        return self._inside.give_up(request, lambda report: report.external_address)

    async def GetRoute(self, request: pb.GetRouteRequest, context: Any) -> pb.TopicRoute:
        """See nameserver.proto."""
        self._inside.check_ready()
        return self._answers.route(request.topic)

    async def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> pb.Cluster:
        """See nameserver.proto."""
        self._inside.check_ready()
        return self._answers.cluster()

    async def WatchRoutes(
        self, request: pb.WatchRoutesRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """See nameserver.proto.  Answers are encoded RouteUpdates."""
        async with aclosing(self._inside.watch(self._answers, request, context)) as updates:
            async for update in updates:
                yield update


def _not_here() -> PermissionDenied:
    return PermissionDenied(
        "brokers and timer services register at the inside port (setting `listen`), not at the"
        " external one",
        field="nameservers",
    )
