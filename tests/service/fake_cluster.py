"""A cluster in one event loop that misbehaves on demand: brokers that lose answers, refuse, stall.

It keeps the rules of protos/README.md (idempotence, epochs, order of answers) independently of the
real broker, so that the SDK's tests check the SDK against the contract.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from socket import socket

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor

from duemq.errors import DuemqError, TopicNotFound
from duemq.transport import status
from duemq.transport.channel import MESSAGE_BYTES_MAX
from duemq.v1 import (
    admin_pb2,
    broker_pb2,
    error_pb2,
    message_pb2,
    nameserver_pb2,
    timer_pb2,
)
from duemq_server.local_cluster.layout import bind_port
from tests.service.fake_keys import FakeKeys
from tests.service.playing import PINGS, play

STORE_MS = 1_790_000_000_000
LIMITS = [
    *PINGS,
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]


@dataclass
class ServerLane:
    """What a broker knows of a producer's lane."""

    epoch: int
    next_sequence: int
    answers: dict[int, broker_pb2.BatchResult] = field(default_factory=dict)


Refuse = Callable[[broker_pb2.Batch], "error_pb2.Error | None"]
RefuseBack = Callable[[broker_pb2.FailedMessage], "error_pb2.Error | None"]


class Place:
    """A server that has its port also while it is stopped: nobody else gets it meanwhile."""

    def __init__(self, *services: FileDescriptor) -> None:
        self.address = ""
        self._services = services
        self._held: list[socket] = []
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        if not self.address:
            self._held.append(bind_port(0))
            self.address = f"127.0.0.1:{self._held[-1].getsockname()[1]}"
        self._server = grpc.aio.server(options=LIMITS)
        play(self, self._server, *self._services)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def close(self) -> None:
        for each in self._held:
            each.close()


class FakeBroker(Place):
    """Stores in memory, survives `stop` and `start` as a real one survives a restart."""

    def __init__(self, cluster: "FakeCluster", name: str) -> None:
        super().__init__(broker_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
        self.cluster = cluster
        self.name = name
        self.store_id = 7_000 + len(cluster.brokers)
        self.topics: dict[str, int] = {}
        self.stored: dict[tuple[str, int], list[bytes]] = {}
        self.message_ids: list[str] = []
        self.requests: list[broker_pb2.SendRequest] = []
        self.streams = 0
        # Faults.
        self.lose_answers = 0
        """So many requests are stored, and the stream broken instead of answered."""
        self.refuse: Refuse = lambda _: None
        self.refuse_unseen: Refuse = lambda _: None
        """As `refuse`, but before it is looked up whether the batch was stored: proves nothing."""
        self.gate = asyncio.Event()
        """Not set: requests are taken and wait."""
        self.gate.set()
        self.auto_create = True
        self.refuse_back: RefuseBack = lambda _: None
        self.sent_back: list[broker_pb2.FailedMessage] = []
        """What groups gave back, each once."""
        self.send_back_requests: list[broker_pb2.SendBackRequest] = []
        self._lanes: dict[tuple[int, str, int, bool], ServerLane] = {}

    async def SendStream(
        self, requests: AsyncIterator[broker_pb2.SendRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[broker_pb2.SendResponse]:
        self.streams += 1
        async for request in requests:
            await self.gate.wait()
            self.requests.append(request)
            results = [self._store(batch) for batch in request.batches]
            if self.lose_answers:
                self.lose_answers -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
            yield broker_pb2.SendResponse(
                request_id=request.request_id,
                results=results,
                broker=self.name,
                store_id=self.store_id,
            )

    def _store(self, batch: broker_pb2.Batch) -> broker_pb2.BatchResult:
        timed = bool(batch.delays_ms or batch.due_ms or batch.delay_levels)
        key = (batch.producer_id, batch.topic, batch.queue_id, timed)
        refusal = self.refuse_unseen(batch)
        if refusal is not None:
            return broker_pb2.BatchResult(error=refusal)
        lane = self._lanes.get(key)
        if lane is None or batch.producer_epoch > lane.epoch:
            lane = None  # starts with whatever comes first
        elif batch.producer_epoch < lane.epoch:
            return failure(error_pb2.FENCED_PRODUCER)
        elif batch.sequence < lane.next_sequence:
            if batch.sequence not in lane.answers:
                return out_of_sequence(batch.sequence, limit=min(lane.answers, default=0))
            answer = broker_pb2.BatchResult()
            answer.CopyFrom(lane.answers[batch.sequence])
            answer.duplicate = True
            return answer
        elif batch.sequence > lane.next_sequence:
            return out_of_sequence(batch.sequence, limit=lane.next_sequence)
        refusal = self.refuse(batch)
        if refusal is None and batch.topic not in self.topics:
            refusal = error_pb2.Error(code=error_pb2.TOPIC_NOT_FOUND, message="no such topic")
        if refusal is not None:
            return broker_pb2.BatchResult(error=refusal)
        if lane is None:
            lane = self._lanes[key] = ServerLane(batch.producer_epoch, batch.sequence)
        answer = self._append(batch, timed)
        lane.answers[batch.sequence] = answer
        lane.next_sequence = batch.sequence + 1
        return answer

    def _append(self, batch: broker_pb2.Batch, timed: bool) -> broker_pb2.BatchResult:
        records = batch.records.records
        columns = {len(each) for each in (batch.sizes, batch.tag_hashes, batch.key_hashes)}
        assert columns in ({len(records)}, {0})
        queue_id = batch.queue_id % 4 if timed else batch.queue_id
        queue = self.stored.setdefault(("%TIMER%" if timed else batch.topic, queue_id), [])
        base_offset = len(queue)
        queue += [record.body for record in records]
        self.message_ids += [record.message_id for record in records]
        due = [STORE_MS + delay for delay in batch.delays_ms] or list(batch.due_ms)
        due = due or [STORE_MS + 1000 * level for level in batch.delay_levels]
        return broker_pb2.BatchResult(
            queue_id=queue_id,
            base_offset=base_offset,
            store_ms=STORE_MS,
            due_ms=due * len(records) if len(due) == 1 else due,
        )

    async def SendBack(
        self, request: broker_pb2.SendBackRequest, context: grpc.aio.ServicerContext
    ) -> broker_pb2.SendBackResponse:
        self.send_back_requests.append(request)
        await self.gate.wait()
        results = [self._take_back(message) for message in request.messages]
        if self.lose_answers:
            self.lose_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return broker_pb2.SendBackResponse(results=results)

    def _take_back(self, message: broker_pb2.FailedMessage) -> broker_pb2.SendBackResult:
        place = {field: getattr(message, field) for field in ("topic", "queue_id", "offset")}
        refusal = self.refuse_back(message)
        if refusal is not None:
            return broker_pb2.SendBackResult(**place, error=refusal)
        known = {(each.topic, each.queue_id, each.offset) for each in self.sent_back}
        if tuple(place.values()) in known:
            return broker_pb2.SendBackResult(**place, duplicate=True)
        self.sent_back.append(message)
        if message.dead_letter:
            return broker_pb2.SendBackResult(**place, dead_letter=True)
        return broker_pb2.SendBackResult(**place, due_ms=STORE_MS + message.delay_ms)

    async def CreateTopic(
        self, request: admin_pb2.CreateTopicRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.TopicDescription:
        if not self.auto_create:
            await context.abort(grpc.StatusCode.NOT_FOUND, "auto_create_topics is off")
        self.topics.setdefault(request.topic.name, request.topic.queues or 4)
        self.cluster.push()
        return admin_pb2.TopicDescription(broker=self.name)

    async def DescribeTopic(
        self, request: admin_pb2.DescribeTopicRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.TopicDescription:
        if request.name not in self.topics:
            await self._abort(context, TopicNotFound(f"no topic {request.name!r}"))
        return admin_pb2.TopicDescription(broker=self.name)

    @staticmethod
    async def _abort(context: grpc.aio.ServicerContext, error: DuemqError) -> None:
        await context.abort(status.status_of(error), status.details(error), status.trailer(error))

    async def DeleteTopic(
        self, request: admin_pb2.DeleteTopicRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.DeleteTopicResponse:
        if self.topics.pop(request.name, None) is None:
            await self._abort(context, TopicNotFound(f"no topic {request.name!r}"))
        self.cluster.push()
        if self.lose_answers:
            self.lose_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return admin_pb2.DeleteTopicResponse()

    def forget_answers(self) -> None:
        """It knows what it has stored, and no longer where."""
        for lane in self._lanes.values():
            lane.answers.clear()

    def bodies(self, topic: str) -> list[bytes]:
        """All that is stored of a topic, queue after queue."""
        return [
            body for (of, _), queue in sorted(self.stored.items()) if of == topic for body in queue
        ]


def failure(code: "error_pb2.ErrorCode", retryable: bool = False) -> broker_pb2.BatchResult:
    return broker_pb2.BatchResult(error=refusal(code, retryable))


def out_of_sequence(sequence: int, limit: int) -> broker_pb2.BatchResult:
    answer = failure(error_pb2.OUT_OF_SEQUENCE)
    answer.error.field, answer.error.value = "sequence", str(sequence)
    answer.error.limit = str(limit)
    return answer


def refusal(code: "error_pb2.ErrorCode", retryable: bool = False) -> error_pb2.Error:
    return error_pb2.Error(
        code=code, message=f"refused: {error_pb2.ErrorCode.Name(code)}", retryable=retryable
    )


class FakeTimer(Place):
    """Knows the handles that it is told."""

    def __init__(self, shard: int, shards: int) -> None:
        super().__init__(timer_pb2.DESCRIPTOR)
        self.shard, self.shards = shard, shards
        self.pending: set[int] = set()
        """Offsets."""
        self.not_yet = 0
        """So many requests come before the message has arrived from its broker."""
        self.asked = 0
        self.missing: set[int] = set()
        """Offsets of messages that have not arrived: requests that may wait for them do."""
        self.arrived = asyncio.Event()
        self.keyed = FakeKeys(shard, shards)

    async def Cancel(
        self, request: timer_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> timer_pb2.CancelResponse:
        self.asked += 1
        if request.keys:
            return await self.keyed.answer(request, context, self.keyed.cancel)
        if self.not_yet:
            self.not_yet -= 1
            error = refusal(error_pb2.UNAVAILABLE, retryable=True)
            results = [timer_pb2.CancelResult(error=error) for _ in request.handles]
            return timer_pb2.CancelResponse(results=results)
        if not request.do_not_wait and self.missing & {each.offset for each in request.handles}:
            await self.arrived.wait()
        return timer_pb2.CancelResponse(
            results=[
                self._result(handle)
                for handle in request.handles
                if handle.queue_id % self.shards == self.shard
            ]
        )

    async def Schedule(
        self, request: timer_pb2.ScheduleRequest, context: grpc.aio.ServicerContext
    ) -> timer_pb2.ScheduleResponse:
        return await self.keyed.answer(request, context, self.keyed.schedule)

    async def Reschedule(
        self, request: timer_pb2.RescheduleRequest, context: grpc.aio.ServicerContext
    ) -> timer_pb2.RescheduleResponse:
        return await self.keyed.answer(request, context, self.keyed.reschedule)

    def _result(self, handle: message_pb2.TimerHandle) -> timer_pb2.CancelResult:
        if handle.offset in self.missing and not self.arrived.is_set():
            return timer_pb2.CancelResult(error=refusal(error_pb2.UNAVAILABLE, retryable=True))
        pending = handle.offset in self.pending
        return timer_pb2.CancelResult(outcome=timer_pb2.CANCELLED if pending else timer_pb2.UNKNOWN)


class FakeCluster:
    """One nameserver and as many brokers as wanted."""

    def __init__(self) -> None:
        self.brokers: dict[str, FakeBroker] = {}
        self.timers: list[FakeTimer] = []
        self.gone: set[str] = set()
        """Brokers that the nameserver no longer names."""
        self.nameserver = ""
        self.timers_hidden: set[int] = set()
        self._watchers: list[asyncio.Queue[None]] = []
        self._server: grpc.aio.Server | None = None

    async def start(self, *names: str, timers: int = 0) -> None:
        self._server = grpc.aio.server(options=PINGS)
        play(self, self._server, nameserver_pb2.DESCRIPTOR)
        self.nameserver = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        for name in names:
            self.brokers[name] = FakeBroker(self, name)
            await self.brokers[name].start()
        for shard in range(timers):
            self.timers.append(FakeTimer(shard, timers))
            await self.timers[-1].start()

    async def stop(self) -> None:
        for server in [*self.brokers.values(), *self.timers]:
            await server.stop()
            server.close()
        await self.stop_nameserver()
        # A server object collected after its loop has closed complains: collect it now.
        gc.collect()

    async def stop_nameserver(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def topic(self, name: str, queues: int = 4) -> None:
        for broker in self.brokers.values():
            broker.topics[name] = queues
        self.push()

    def hide_timers(self, *shards: int) -> None:
        """These timer shards, or all."""
        self.timers_hidden = set(shards or range(len(self.timers)))
        self.push()

    def push(self) -> None:
        for watcher in self._watchers:
            watcher.put_nowait(None)

    async def WatchRoutes(
        self, request: nameserver_pb2.WatchRoutesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[nameserver_pb2.RouteUpdate]:
        watcher: asyncio.Queue[None] = asyncio.Queue()
        self._watchers.append(watcher)
        try:
            while True:
                yield self._routes()
                await watcher.get()
        finally:
            self._watchers.remove(watcher)

    def _routes(self) -> nameserver_pb2.RouteUpdate:
        live = [broker for broker in self.brokers.values() if broker.name not in self.gone]
        topics = sorted({topic for broker in live for topic in broker.topics})
        return nameserver_pb2.RouteUpdate(
            whole=True,
            brokers=[
                nameserver_pb2.BrokerInstance(name=b.name, address=b.address, store_id=b.store_id)
                for b in live
            ],
            timers=[
                nameserver_pb2.TimerInstance(
                    name=f"timer-{t.shard}", address=t.address, shard=t.shard, shards=t.shards
                )
                for t in self.timers
                if t.shard not in self.timers_hidden
            ],
            routes=[
                nameserver_pb2.TopicRoute(
                    topic=topic,
                    brokers=[
                        nameserver_pb2.BrokerQueues(
                            broker=b.name,
                            address=b.address,
                            queues=b.topics[topic],
                            readable=True,
                            writable=True,
                        )
                        for b in live
                        if topic in b.topics
                    ],
                )
                for topic in topics
            ],
        )


__all__ = ["STORE_MS", "FakeBroker", "FakeCluster", "FakeTimer", "refusal"]
