"""Spans of messages that a shard takes under their keys."""

import asyncio
from types import SimpleNamespace

import pytest

from duemq.v1 import timer_pb2
from duemq.v1.message_pb2 import Record, RecordBatch
from duemq_server.timer_service.edge import schedule_requests
from duemq_server.timer_service.edge.schedule_requests import ScheduleRequests
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId

HANDLE = Cancelled(SourceId(1, 0), 5, 9_000)
RESULT = SimpleNamespace(outcome=timer_pb2.SCHEDULED, handle=HANDLE, replaced=None)


class Shard:
    """Answers when it may, as if it knew all requests."""

    def __init__(self):
        found = SimpleNamespace(find=lambda key: b"decided")
        self.scheduler = SimpleNamespace(keyed=SimpleNamespace(requests=found))
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Event()

    def now_ms(self):
        return 1_000

    async def schedule(self, request_id, records, *, if_absent):
        self.asked.set()
        await self.may_answer.wait()
        return [RESULT] * len(records.keys)


def request(number):
    return timer_pb2.ScheduleRequest(
        request_id=number.to_bytes(16, "big"),
        topic="orders",
        queue_id=-1,
        delays_ms=[8_000],
        records=RecordBatch(records=[Record(body=b"x", timer_key="k")]),
    )


@pytest.fixture
def spanned(monkeypatch):
    """Offsets of what has a span."""
    recorded = []
    fake = SimpleNamespace(
        enabled=lambda: True,
        traced=lambda topic: True,
        record_schedule=lambda *place, **rest: recorded.append(place[3]),
    )
    monkeypatch.setattr(schedule_requests, "spans", fake)
    return recorded


def requests_of(shard):
    async def may():
        return None

    place = SimpleNamespace(check_key=lambda topic, key: None)
    links = SimpleNamespace(check_may_serve=lambda: None, check_may_take=may, place=place)
    return ScheduleRequests(shard, links, SimpleNamespace(name="timer-0"))


async def test_a_request_that_comes_again_has_one_span(spanned):
    shard = Shard()
    shard.may_answer.set()
    requests = requests_of(shard)
    for number in (1, 1, 2, 1):
        await requests.schedule(request(number))
    assert spanned == [5, 5]


async def test_a_request_that_was_broken_off_has_its_span_when_it_comes_again(spanned):
    shard = Shard()
    requests = requests_of(shard)
    broken_off = asyncio.ensure_future(requests.schedule(request(1)))
    await shard.asked.wait()
    broken_off.cancel()
    await asyncio.wait([broken_off])
    shard.may_answer.set()
    await requests.schedule(request(1))
    assert spanned == [5]


async def test_only_the_last_requests_are_remembered(spanned, monkeypatch):
    monkeypatch.setattr(schedule_requests, "SPANNED_MAX", 2)
    shard = Shard()
    shard.may_answer.set()
    requests = requests_of(shard)
    for number in (1, 2, 3, 2, 1):
        await requests.schedule(request(number))
    assert len(spanned) == 4
