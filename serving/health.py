"""gRPC health: what a process and its services say of themselves to probes and balancers.

gRPC's own servicer writes to watchers under a lock, so that one who does not read holds up who
changes a status, and its watchers hold up a stop for as long as calls may take.

Owned by: the event loop.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):
    """The methods of grpc.health.v1.Health; List is not served."""

    def __init__(self) -> None:
        self._status: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {}
        self._changed = asyncio.Event()
        self._draining = False

    def tell(self, service: str, *, serving: bool) -> None:
        """What a service is from now on.  Not after `drain`."""
        if not self._draining:
            self._status[service] = SERVING if serving else NOT_SERVING
            self._wake()

    def drain(self) -> None:
        """Nothing serves any more: watchers are told, and their streams end."""
        self._draining = True
        self._status = dict.fromkeys(self._status, NOT_SERVING)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """The status of a service."""
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, _context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status of a service, and each one after it, but for what a slow reader missed."""
        told = None
        while True:
            changed = self._changed
            status = self._status.get(request.service, UNKNOWN)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            elif self._draining:
                return
            else:
                await changed.wait()
