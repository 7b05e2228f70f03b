"""ChangePending: from protobuf to one call of the shard, and back."""

from __future__ import annotations

from duemq.errors import Corrupt
from duemq.protocol import checks, names, timer_keys
from duemq.protocol.due import DUE_MS_MAX
from duemq.transport import status
from duemq.v1 import timer_pb2
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.cancel_requests import check_request_id
from duemq_server.timer_service.edge.topic_queues import topic_queues
from duemq_server.timer_service.scheduling.bulk.jobs import Job, Which
from duemq_server.timer_service.shard import Shard

WAIT_S = 2.0  # for a job, before it is told how far it is


class BulkRequests:
    """Of one shard."""

    def __init__(self, shard: Shard, links: BrokerLinks) -> None:
        self._shard = shard
        self._links = links

    async def change(
        self, request: timer_pb2.ChangePendingRequest
    ) -> timer_pb2.ChangePendingResponse:
        """Raises DuemqErrors, as of the rpc."""
        which = which_of(request)
        self._links.check_may_serve()
        known = self._shard.scheduler.bulk.find(request.request_id)
        if which.to_topic and (known is None or request.dry_run):
            # Of a repeat it may be gone by now.
            await topic_queues(self._links, which.to_topic, "to_topic")
        if request.dry_run:
            count = await self._shard.bulk.count(which)
            return timer_pb2.ChangePendingResponse(count=count, over=True)
        check_request_id(request.request_id)
        job = await self._shard.bulk.change(request.request_id, which, WAIT_S)
        if job is None:
            return timer_pb2.ChangePendingResponse(waits=True)
        response = timer_pb2.ChangePendingResponse(count=job.count, over=bool(job.over_ms))
        if job.problem:
            response.error.CopyFrom(status.to_proto(Corrupt(job.problem)))
        return response


def request_of(job: Job) -> timer_pb2.ChangePendingRequest:
    """As it was asked for."""
    which = job.which
    request = timer_pb2.ChangePendingRequest(
        request_id=job.id,
        topic=which.topic,
        key_prefix=which.key_prefix,
        from_ms=which.from_ms,
        to_ms=which.to_ms,
    )
    if which.by_ms is not None:
        request.shift_ms = which.by_ms
    elif which.to_topic:
        request.to_topic = which.to_topic
    else:
        request.cancel = True
    return request


def which_of(request: timer_pb2.ChangePendingRequest) -> Which:
    """Raises InvalidArgument."""
    names.check_topic(request.topic)
    if request.key_prefix:
        timer_keys.check_timer_key(request.key_prefix, "key_prefix")
    checks.whole("from_ms", request.from_ms, 0, DUE_MS_MAX)
    checks.whole("to_ms", request.to_ms, 0, DUE_MS_MAX + 1)
    to_ms = request.to_ms or DUE_MS_MAX + 1
    if to_ms <= request.from_ms:
        raise checks.wrong("to_ms", to_ms, f"after from_ms, {request.from_ms}")
    change = request.WhichOneof("change")
    if change == "shift_ms":
        checks.whole("shift_ms", request.shift_ms, -DUE_MS_MAX, DUE_MS_MAX)
        if not request.shift_ms:
            raise checks.wrong("shift_ms", 0, "a time, below zero for sooner")
        by_ms = request.shift_ms
    elif change == "to_topic":
        by_ms = None
        _check_move(request)
    elif change == "cancel" and request.cancel:
        by_ms = None
    else:
        raise checks.wrong("change", "", "cancel (true), shift_ms or to_topic")
    named = request.topic, request.key_prefix
    return Which(*named, request.from_ms, to_ms, by_ms, request.to_topic)


def _check_move(request: timer_pb2.ChangePendingRequest) -> None:
    timer_keys.check_move(request.topic, request.to_topic)
    if request.key_prefix:
        raise checks.wrong("key_prefix", request.key_prefix, "none: messages with keys stay")
