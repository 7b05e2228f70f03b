"""The service TimerInspector: from protobuf to one call and back."""

from __future__ import annotations

from typing import Any

from duemq.v1 import timer_inspector_pb2
from duemq_server.timer_service.inspecting import Inspector

SERVICE = timer_inspector_pb2.DESCRIPTOR.services_by_name["TimerInspector"]


class TimerInspectorServicer:
    """See protos/duemq/v1/timer_inspector.proto."""

    def __init__(self, inspector: Inspector) -> None:
        self._inspector = inspector

    async def CountTimers(
        self, request: timer_inspector_pb2.CountTimersRequest, _: Any
    ) -> timer_inspector_pb2.CountTimersResponse:
        """The ledger by topic."""
        found = await self._inspector.counts(request.topic)
        return timer_inspector_pb2.CountTimersResponse(
            topics=[
                timer_inspector_pb2.TopicTimers(
                    topic=topic,
                    pending=each.pending,
                    accepted=each.accepted,
                    fired=each.fired,
                    cancelled=each.cancelled,
                    lost=each.lost,
                )
                for topic, each in found.items()
            ]
        )

    async def GetHistogram(
        self, request: timer_inspector_pb2.GetHistogramRequest, _: Any
    ) -> timer_inspector_pb2.TimerHistogram:
        """What falls due when."""
        now_ms, found = await self._inspector.histogram(request.topic, request.at_ms)
        buckets = [timer_inspector_pb2.TimerBucket(**each._asdict()) for each in found]
        return timer_inspector_pb2.TimerHistogram(now_ms=now_ms, buckets=buckets)
