"""What a played timer shard knows of timers under keys.

It keeps the rules of timer.proto, independently of the real shard, and misbehaves on demand.
"""

import asyncio
from collections import Counter
from zlib import crc32

import grpc
import grpc.aio

from duemq.errors import DuemqError, TooLarge
from duemq.transport import status
from duemq.v1 import message_pb2, timer_pb2

NOW_MS = 1_790_000_000_000
STORE_ID = 9_000


class FakeKeys:
    """In memory; survives `stop` and `start` of its shard."""

    def __init__(self, shard: int, shards: int) -> None:
        self.shard, self.shards = shard, shards
        self.waiting: dict[tuple[str, str], message_pb2.TimerHandle] = {}
        self.records: dict[int, message_pb2.Record] = {}
        """By offset, also of what waits no more."""
        self.fired: set[tuple[str, str]] = set()
        self.requests: list[object] = []
        """Each as it came, repeats too."""
        self.running = self.most_running = 0
        # Faults.
        self.lose_answers = 0
        """So many requests are done, and not answered."""
        self.refuse: list[DuemqError] = []
        """The next requests fail with these, and nothing is done."""
        self.refuse_timers: Counter[str] = Counter()
        """Key → how often it has an error of its own that says to ask again."""
        self.unanswered: list[set[int]] = []
        """Places of timers in the next requests that another shard has, which does not answer."""
        self.bytes_max: int | None = None
        """A request that reschedules more bytes of bodies is TOO_LARGE, and nothing is done."""
        self.gate = asyncio.Event()
        """Not set: requests are taken and wait."""
        self.gate.set()
        self._answers: dict[bytes, object] = {}

    async def answer(self, request, context, decide):
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        assert len(request.request_id) == 16
        error = self.refuse.pop(0) if self.refuse else self._too_large(request)
        if error is not None:
            await context.abort(
                status.status_of(error), status.details(error), status.trailer(error)
            )
        if request.request_id not in self._answers:
            self._answers[request.request_id] = decide(request)
        if self.lose_answers:
            self.lose_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return self._without(request, self._answers[request.request_id])

    def _too_large(self, request):
        if self.bytes_max is None or not isinstance(request, timer_pb2.RescheduleRequest):
            return None
        waiting = (self.waiting.get(self._key_of(ref)) for ref in request.timers)
        size = sum(len(self.records[each.offset].body) for each in waiting if each is not None)
        return TooLarge("name fewer", field="timers") if size > self.bytes_max else None

    def _without(self, request, answer):
        """As if another shard had some of the timers, and did not answer."""
        if not self.unanswered:
            return answer
        assert request.partial
        told = type(answer)()
        told.CopyFrom(answer)
        for at in self.unanswered.pop(0):
            error = {"code": 40, "message": "another one is away", "retryable": True}
            told.results[at].CopyFrom(timer_pb2.RescheduleResult(error=error, unanswered=True))
        return told

    def schedule(self, request: timer_pb2.ScheduleRequest) -> timer_pb2.ScheduleResponse:
        records = request.records.records
        keys = [record.timer_key for record in records]
        assert 1 <= len(keys) <= 1000
        assert len(set(keys)) == len(keys)
        answer = timer_pb2.ScheduleResponse(now_ms=NOW_MS)
        for record, due_ms in zip(records, self._dues(request, len(keys)), strict=True):
            key = request.topic, record.timer_key
            self._check(key)
            there = self.waiting.get(key)
            if there is not None and request.if_absent:
                answer.results.add(outcome=timer_pb2.EXISTS, handle=there)
                continue
            outcome = timer_pb2.REPLACED if there is not None else timer_pb2.SCHEDULED
            answer.results.add(outcome=outcome, handle=self._add(key, record, due_ms))
            if there is not None:
                answer.results[-1].replaced.CopyFrom(there)
        return answer

    def cancel(self, request: timer_pb2.CancelRequest) -> timer_pb2.CancelResponse:
        answer = timer_pb2.CancelResponse()
        for named in request.keys:
            key = named.topic, named.key
            self._check(key)
            result = answer.results.add(outcome=timer_pb2.UNKNOWN)
            if self._later(named.key, result):
                continue
            if self.waiting.pop(key, None) is not None:
                result.outcome = timer_pb2.CANCELLED
            elif key in self.fired:
                result.outcome = timer_pb2.FIRED
        return answer

    def reschedule(self, request: timer_pb2.RescheduleRequest) -> timer_pb2.RescheduleResponse:
        answer = timer_pb2.RescheduleResponse()
        for ref, due_ms in zip(
            request.timers, self._dues(request, len(request.timers)), strict=True
        ):
            key = self._key_of(ref)
            result = answer.results.add(outcome=timer_pb2.RESCHEDULE_UNKNOWN)
            if key is not None and self._later(key[1], result):
                continue
            there = self.waiting.get(key)
            if there is not None:
                result.outcome = timer_pb2.RESCHEDULED
                result.handle.CopyFrom(self._add(key, self.records[there.offset], due_ms))
                if request.fire_now:
                    del self.waiting[key]
                    self.fired.add(key)
            elif key in self.fired:
                result.outcome = timer_pb2.RESCHEDULE_FIRED
        return answer

    def _later(self, timer_key: str, result) -> bool:
        if not self.refuse_timers[timer_key]:
            return False
        self.refuse_timers[timer_key] -= 1
        result.Clear()
        result.error.code, result.error.retryable = 40, True
        return True

    def _add(self, key, record, due_ms) -> message_pb2.TimerHandle:
        offset = len(self.records)
        self.records[offset] = record
        handle = self.waiting[key] = message_pb2.TimerHandle(
            store_id=STORE_ID, queue_id=self.shard, offset=offset, due_ms=due_ms
        )
        return handle

    def _key_of(self, ref: timer_pb2.TimerRef):
        if ref.WhichOneof("ref") == "key":
            key = ref.key.topic, ref.key.key
            self._check(key)
            return key
        assert ref.handle.queue_id % self.shards == self.shard
        return next((key for key, there in self.waiting.items() if there == ref.handle), None)

    def _check(self, key: tuple[str, str]) -> None:
        assert crc32("\0".join(key).encode()) % self.shards == self.shard

    @staticmethod
    def _dues(request, count: int) -> list[int]:
        if getattr(request, "fire_now", False):
            assert not request.delays_ms
            assert not request.due_ms
            return [NOW_MS] * count
        assert bool(request.delays_ms) != bool(request.due_ms)
        dues = [NOW_MS + delay for delay in request.delays_ms] or list(request.due_ms)
        return dues * count if len(dues) == 1 else dues
