"""The service TimerAdmin, and what the broker asks of timer services before it serves them."""

from collections.abc import Callable
from typing import Any

from duemq.errors import Unavailable
from duemq.protocol import checks, names
from duemq.protocol.limits import QUEUES_MAX
from duemq.v1 import broker_pb2, timer_admin_pb2
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.records.timer_claims import Decision, Service
from duemq_server.broker.store.changes import timer_queue_changes
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.replication.protocol.record import FORMERS_MAX

SERVICE = timer_admin_pb2.DESCRIPTOR.services_by_name["TimerAdmin"]


class TimerAdminServicer:
    """Who may read %TIMER%; the servicer of TimerAdmin."""

    def __init__(
        self,
        store: Store,
        commits: Commits,
        store_id: int,
        now_ms: Callable[[], int],
        steady_ms: Callable[[], int],
    ) -> None:
        """`steady_ms`: a clock that nobody sets."""
        self._store = store
        self._owners = store.timer_owners
        self._commits = commits
        self._store_id = store_id
        self._now_ms = now_ms
        self._steady_ms = steady_ms

    def check_meant(self, store_id: int) -> None:
        """Raises Unavailable if another broker is meant, which was at this address; 0: any is."""
        if store_id not in (0, self._store_id):
            raise Unavailable(
                f"store_id: this broker has {self._store_id:016x}, not {store_id:016x}",
                field="store_id",
                value=store_id,
                limit=self._store_id,
            )

    async def claim(
        self, request: broker_pb2.ClaimTimerQueuesRequest
    ) -> broker_pb2.ClaimTimerQueuesResponse:
        """Queues for a service, durably.  Raises the errors of ClaimTimerQueues."""
        self.check_meant(request.store_id)
        asked = request.service
        service = Service(
            asked.id, asked.name, asked.shard, asked.shards, asked.key_shards, asked.empty
        )
        checks.count("queue_ids", len(request.queue_ids), 0, QUEUES_MAX, "in a request")
        checks.count("ends", len(request.ends), 0, QUEUES_MAX, "in a request")
        ends = {each.queue_id: each.offset for each in request.ends}
        checks.count("formers", len(request.formers), 0, FORMERS_MAX, "in a request")
        decision, settled = timer_queue_changes.claim(
            self._store,
            service,
            request.queue_ids,
            self._steady_ms(),
            ends,
            request.formers,
            request.epoch,
            now_ms=self._now_ms(),
        )
        await self._commits.wait(settled)
        return broker_pb2.ClaimTimerQueuesResponse(
            store_id=self._store_id,
            now_ms=self._now_ms(),
            queues=[self._claimed(queue_id, decision) for queue_id in request.queue_ids],
            key_shards=self._owners.key_shards,
            holders=map(self._holder, self._owners.holders(service.id)),
        )

    def _holder(self, service: Service) -> broker_pb2.TimerService:
        told = _to_proto(service)
        told.epoch = self._owners.epoch_of(service.id)
        return told

    def _claimed(self, queue_id: int, decision: Decision) -> broker_pb2.TimerQueueClaim:
        owner = decision.waits.get(queue_id)
        return broker_pb2.TimerQueueClaim(
            queue_id=queue_id,
            owner=_to_proto(owner) if owner is not None else None,
            begin_offset=self._owners.begin_of(queue_id),
        )

    def check_fetch(self, request: broker_pb2.FetchFramesRequest) -> None:
        """Raises FencedTimer if the queue is another service's."""
        if request.topic == names.TIMER_TOPIC:
            self._owners.check(request.queue_id, request.timer_id, self._steady_ms())

    async def ListTimerOwners(
        self, _request: timer_admin_pb2.ListTimerOwnersRequest, _: Any
    ) -> timer_admin_pb2.ListTimerOwnersResponse:
        """Who owns each queue of %TIMER%."""
        queues = self._store.queues_of(names.TIMER_TOPIC)
        owners = {each.id for each in map(self._owner, queues) if each is not None}
        others = [each for each in self._owners.holders() if each.id not in owners]
        return timer_admin_pb2.ListTimerOwnersResponse(
            queues=map(self._describe, queues), others=map(_to_proto, others)
        )

    def _owner(self, queue: Queue) -> Service | None:
        claim = self._owners.claim_of(queue.queue_id)
        return claim.service if claim is not None else None

    def _describe(self, queue: Queue) -> timer_admin_pb2.TimerQueueOwner:
        committed = self._store.tables.timers_taken_over(queue.queue_id)
        told = timer_admin_pb2.TimerQueueOwner(
            queue_id=queue.queue_id,
            committed_offset=committed,
            min_offset=queue.min_offset,
            max_offset=queue.max_offset,
            waiting=queue.records_from(max(committed, queue.min_offset)),
        )
        claim = self._owners.claim_of(queue.queue_id)
        if claim is not None:
            told.owner.CopyFrom(_to_proto(claim.service))
            told.since_ms = claim.since_ms
            told.last_seen_ms = self._told(self._owners.last_seen_ms(claim.service.id))
            told.released = claim.released
        refused = self._owners.refused_of(queue.queue_id)
        if refused is not None:
            told.refused.CopyFrom(_to_proto(refused[0]))
            told.refused_ms = self._told(refused[1])
        return told

    def _told(self, steady_ms: int) -> int:
        """Unix time in ms, for people; 0: never."""
        return self._now_ms() - (self._steady_ms() - steady_ms) if steady_ms else 0

    async def ReleaseTimerQueues(
        self, request: timer_admin_pb2.ReleaseTimerQueuesRequest, _: Any
    ) -> timer_admin_pb2.ReleaseTimerQueuesResponse:
        """Lets another service claim a lost one's queues."""
        settled = timer_queue_changes.release(self._store, request.id, self._steady_ms())
        await self._commits.wait(settled)
        return timer_admin_pb2.ReleaseTimerQueuesResponse()


def _to_proto(service: Service) -> broker_pb2.TimerService:
    return broker_pb2.TimerService(
        id=service.id,
        name=service.name,
        shard=service.shard,
        shards=service.shards,
        key_shards=service.key_shards,
        empty=service.empty,
    )
