"""Timers under keys at real shards and brokers, in one process: answers, limits, delivery."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duemq import CancelOutcome, FireOutcome, Outgoing, RescheduleOutcome, aio
from duemq.errors import DuemqError, ErrorCode, TimerExists
from duemq.protocol.timer_keys import shard_of
from duemq.transport import status
from duemq.v1 import admin_pb2, message_pb2, timer_pb2
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_service import (
    TOPIC,
    WAIT_S,
    Shard,
    bodies_of,
    delivered,
    running_shard,
    send,
)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0", "b1") as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


async def all_delivered(cluster: Cluster) -> list[bytes]:
    """Of both brokers."""
    found = [bodies_of(await delivered(cluster, broker)) for broker in ("b0", "b1")]
    return sorted(body for bodies in found for body in bodies)


def request_of(*keys: str, **fields: Any) -> timer_pb2.ScheduleRequest:
    """An hour from now."""
    records = [message_pb2.Record(body=b"x", message_id=key, timer_key=key) for key in keys]
    given = {
        "request_id": secrets.token_bytes(16),
        "topic": TOPIC,
        "queue_id": -1,
        "records": message_pb2.RecordBatch(records=records),
        "delays_ms": [3_600_000],
        **fields,
    }
    return timer_pb2.ScheduleRequest(**given)


async def schedule(shard: Shard, request: timer_pb2.ScheduleRequest) -> list[Any]:
    return list((await status.answer(shard._stub.Schedule(request, timeout=WAIT_S))).results)


async def refusal(shard: Shard, request: timer_pb2.ScheduleRequest) -> DuemqError:
    with pytest.raises(DuemqError) as raised:
        await schedule(shard, request)
    return raised.value


async def test_one_of_two_shards_keeps_each_key(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        running_shard(cluster, tmp_path, name="t0", shard=0, shards=2) as first,
        running_shard(cluster, tmp_path, name="t1", shard=1, shards=2) as second,
        aio.Producer(cluster.nameserver) as producer,
    ):
        await producer._client.wait_for(lambda routes: len(routes.timers) == 2, WAIT_S)
        keys = [f"k{n}" for n in range(40)]
        messages = [Outgoing(key.encode(), timer_key=key, delay="1h") for key in keys]
        receipts = await producer.send_many(TOPIC, messages)
        again = await producer.send_many(TOPIC, messages)
        assert [each.replaced for each in again] == [each.handle for each in receipts]
        assert {each.broker for each in again} == {"t0", "t1"}
        stats = [await each.stats() for each in (first, second)]
        mine = [sum(shard_of(TOPIC, key, 2) == shard for key in keys) for shard in (0, 1)]
        assert [(each.pending, each.replaced, each.accepted) for each in stats] == [
            (count, count, 2 * count) for count in mine
        ]
        with pytest.raises(TimerExists) as raised:
            await producer.send(TOPIC, b"", timer_key="k3", delay=1, if_absent=True)
        assert raised.value.handle == again[3].handle
        assert (
            await producer.cancel(key=[(TOPIC, key) for key in keys[:10]])
            == [CancelOutcome.CANCELLED] * 10
        )
        assert await producer.cancel(receipts[20]) is CancelOutcome.CANCELLED
        assert await producer.cancel(again[20]) is CancelOutcome.CANCELLED
        assert await producer.cancel(key=(TOPIC, "k20")) is CancelOutcome.UNKNOWN
        due = await producer.reschedule(key=[(TOPIC, key) for key in keys[21:]], delay=0)
        assert {each.outcome for each in due} == {RescheduleOutcome.RESCHEDULED}

        async def all_fired() -> bool:
            total = [await each.stats() for each in (first, second)]
            return sum(each.fired - each.in_flight for each in total) == 19

        await until(all_fired)
        assert await producer.cancel(key=(TOPIC, "k21")) is CancelOutcome.FIRED
        assert await all_delivered(cluster) == sorted(key.encode() for key in keys[21:])


async def test_a_key_is_free_again_once_its_message_fired(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard, aio.Producer(cluster.nameserver) as sends:
        await sends.send(TOPIC, b"1", timer_key="k", delay=0, ordering_key="o")
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
        second = await sends.send(TOPIC, b"2", timer_key="k", delay=0, ordering_key="o")
        assert second.replaced is None
        await shard.until(lambda stats: stats.fired == 2 and not stats.in_flight)
        assert await all_delivered(cluster) == [b"1", b"2"]
        [records] = [
            records
            for broker in ("b0", "b1")
            for records in (await delivered(cluster, broker)).values()
            if records
        ]
        assert [record.timer_key for record in records] == ["k", "k"]


async def test_a_message_that_a_broker_took_is_rescheduled_by_its_handle(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with running_shard(cluster, tmp_path) as shard, aio.Producer(cluster.nameserver) as sends:
        receipt = await sends.send(TOPIC, b"1", delay="1h", key="look-up")
        answer = await sends.reschedule(receipt, delay=0)
        assert answer.outcome is RescheduleOutcome.RESCHEDULED
        assert await sends.cancel(receipt) is CancelOutcome.CANCELLED
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
        assert await all_delivered(cluster) == [b"1"]
        assert (await sends.reschedule(answer.handle, delay=5)).outcome is RescheduleOutcome.FIRED
        assert (await sends.reschedule(receipt, delay=5)).outcome is RescheduleOutcome.UNKNOWN
        stats = await shard.stats()
        assert (stats.accepted, stats.fired, stats.replaced, stats.pending) == (2, 1, 1, 0)


async def test_answers_hold_over_a_restart(cluster: Cluster, tmp_path: Path) -> None:
    request = request_of("a", "b", "c")
    async with running_shard(cluster, tmp_path) as shard:
        first = await schedule(shard, request)
        [replaced] = await schedule(shard, request_of("a"))
        assert replaced.replaced == first[0].handle
    async with running_shard(cluster, tmp_path) as shard:
        assert await schedule(shard, request) == first  # a repeat
        [there] = await schedule(shard, request_of("a", if_absent=True))
        assert (there.outcome, there.handle) == (timer_pb2.EXISTS, replaced.handle)
        stats = await shard.stats()
        assert (stats.accepted, stats.pending, stats.replaced) == (4, 3, 1)


async def test_a_repeat_does_nothing_more(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        request = request_of("a")
        first = await schedule(shard, request)
        [second] = await schedule(shard, request_of("a"))
        assert await schedule(shard, request) == first
        cancel = timer_pb2.CancelRequest(
            keys=[timer_pb2.TimerKey(topic=TOPIC, key="a")], request_id=secrets.token_bytes(16)
        )
        for _ in range(2):
            answer = await status.answer(shard._stub.Cancel(cancel, timeout=WAIT_S))
            assert answer.results[0].outcome == timer_pb2.CANCELLED
            await schedule(shard, request)
        reschedule = timer_pb2.RescheduleRequest(
            request_id=secrets.token_bytes(16),
            timers=[timer_pb2.TimerRef(handle=second.handle)],
            delays_ms=[0],
        )
        answer = await status.answer(shard._stub.Reschedule(reschedule, timeout=WAIT_S))
        assert answer.results[0].outcome == timer_pb2.RESCHEDULE_UNKNOWN
        assert await status.answer(shard._stub.Reschedule(reschedule, timeout=WAIT_S)) == answer


async def test_a_repeat_is_answered_though_the_topic_is_gone(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        request = request_of("a")
        first = await schedule(shard, request)
        for client in cluster.clients.values():
            await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name=TOPIC))
        await until(lambda: not shard.service._links.queues_of(TOPIC))
        assert await schedule(shard, request) == first
        assert (await refusal(shard, request_of("a"))).code == ErrorCode.TOPIC_NOT_FOUND


async def test_without_its_broker_a_topic_is_known_on(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        await schedule(shard, request_of("a"))
        await cluster.stop_broker("b0")
        await cluster.stop_broker("b1")
        routes = shard.service._routes.cache
        await until(lambda: not routes.brokers)
        [again] = await schedule(shard, request_of("a", queue_id=1, broker="b0"))
        assert again.outcome == timer_pb2.REPLACED
    async with running_shard(cluster, tmp_path) as shard:
        error = await refusal(shard, request_of("a"))
        assert (error.code, error.retryable) == (ErrorCode.UNAVAILABLE, True)
        assert "lost lately: b0, b1" in str(error)


async def test_a_topic_may_be_new(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard, aio.Producer(cluster.nameserver) as sends:
        await sends.send("made-for-it", b"1", timer_key="k", delay="1h")
        assert (await shard.stats()).pending == 1


def wide(count: int) -> message_pb2.RecordBatch:
    record = message_pb2.Record(body=b"x" * (3 << 20))
    return message_pb2.RecordBatch(
        records=[message_pb2.Record(body=record.body, timer_key=f"k{n}") for n in range(count)]
    )


@pytest.mark.parametrize(
    ("wrong", "code", "field", "text"),
    [
        ({"request_id": b"short"}, "INVALID_ARGUMENT", "request_id", "16 random bytes"),
        ({"topic": "none"}, "TOPIC_NOT_FOUND", "topic", "serves topic 'none': make it first"),
        ({"topic": "%TRACE%"}, "INVALID_ARGUMENT", "topic", "topics of your own"),
        ({"topic": "a b"}, "INVALID_ARGUMENT", "topic", "1 to 127"),
        ({"queue_id": 2, "broker": "b0"}, "QUEUE_NOT_FOUND", "queue_id", "no queue 2 at broker"),
        ({"queue_id": 0, "broker": "b9"}, "QUEUE_NOT_FOUND", "queue_id", "'b9'"),
        ({"queue_id": 0}, "INVALID_ARGUMENT", "broker", "not empty"),
        ({"broker": "b0"}, "INVALID_ARGUMENT", "broker", "only with a queue_id"),
        ({"queue_id": -2}, "INVALID_ARGUMENT", "queue_id", "-2"),
        ({"delays_ms": []}, "INVALID_ARGUMENT", "due_ms", "neither"),
        ({"due_ms": [5]}, "INVALID_ARGUMENT", "due_ms", "both"),
        ({"delays_ms": [1, 2, 3]}, "INVALID_ARGUMENT", "delays_ms", "3 entries"),
        ({"delays_ms": [-1]}, "INVALID_ARGUMENT", "delays_ms", "-1"),
        ({"delays_ms": [253_402_300_799_999]}, "INVALID_ARGUMENT", "delays_ms", "0 to"),
        ({"delays_ms": [], "due_ms": [253_402_300_800_000]}, "INVALID_ARGUMENT", "due_ms", "0 to"),
        ({"records": wide(3)}, "TOO_LARGE", "records", "at most 8388608"),
    ],
)
async def test_what_is_wrong_is_named(
    cluster: Cluster, tmp_path: Path, wrong: dict[str, Any], code: str, field: str, text: str
) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        error = await refusal(shard, request_of("a", "b", **wrong))
        assert (error.code, error.field) == (ErrorCode[code], field)
        assert text in str(error)
        assert (await shard.stats()).accepted == 0


def record(**fields: Any) -> message_pb2.Record:
    return message_pb2.Record(**{"timer_key": "k", **fields})


@pytest.mark.parametrize(
    ("records", "code", "field"),
    [
        ([], "INVALID_ARGUMENT", "records"),
        ([record(timer_key=f"k{n}") for n in range(1001)], "INVALID_ARGUMENT", "records"),
        ([record(timer_key="")], "INVALID_ARGUMENT", "records[0].timer_key"),
        ([record(), record(timer_key="x" * 256)], "INVALID_ARGUMENT", "records[1].timer_key"),
        ([record(timer_key="a\tb")], "INVALID_ARGUMENT", "records[0].timer_key"),
        ([record(), record()], "INVALID_ARGUMENT", "records[1].timer_key"),
        ([record(body=b"x" * ((4 << 20) + 1))], "TOO_LARGE", "records[0].body"),
        ([record(properties={"p": "x" * (32 << 10)})], "TOO_LARGE", "records[0].properties"),
    ],
)
async def test_a_wrong_record_is_named(
    cluster: Cluster, tmp_path: Path, records: list[message_pb2.Record], code: str, field: str
) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        batch = message_pb2.RecordBatch(records=records)
        error = await refusal(shard, request_of(records=batch))
        assert (error.code, error.field) == (ErrorCode[code], field)
        assert (await shard.stats()).accepted == 0


async def test_a_key_of_another_shard_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        running_shard(cluster, tmp_path, name="t0", shard=0, shards=2),
        running_shard(cluster, tmp_path, name="t1", shard=1, shards=2) as shard,
    ):
        other = next(f"k{n}" for n in range(100) if shard_of(TOPIC, f"k{n}", 2) == 0)
        error = await refusal(shard, request_of(other))
        assert (error.code, error.retryable) == (ErrorCode.UNAVAILABLE, True)
        assert "belongs to shard 0 of 2" in str(error)
        cancel = timer_pb2.CancelRequest(keys=[timer_pb2.TimerKey(topic=TOPIC, key=other)])
        answer = await status.answer(shard._stub.Cancel(cancel, timeout=WAIT_S))
        assert answer.results[0].error.code == ErrorCode.UNAVAILABLE
        reschedule = timer_pb2.RescheduleRequest(
            request_id=secrets.token_bytes(16),
            timers=[timer_pb2.TimerRef(key=timer_pb2.TimerKey(topic=TOPIC, key=other))],
            delays_ms=[0],
        )
        with pytest.raises(DuemqError, match="belongs to shard 0 of 2"):
            await status.answer(shard._stub.Reschedule(reschedule, timeout=WAIT_S))


async def test_handles_and_keys_in_one_cancel(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        [handle] = await send(cluster, [b"a"], [3_600_000])
        await shard.until(lambda stats: stats.pending == 1)
        await schedule(shard, request_of("k"))
        request = timer_pb2.CancelRequest(
            handles=[handle],
            keys=[timer_pb2.TimerKey(topic=TOPIC, key=key) for key in ("none", "k", "")],
            request_id=secrets.token_bytes(16),
        )
        answer = await status.answer(shard._stub.Cancel(request, timeout=WAIT_S))
        outcomes = [each.outcome for each in answer.results]
        assert outcomes[:3] == [timer_pb2.CANCELLED, timer_pb2.UNKNOWN, timer_pb2.CANCELLED]
        assert answer.results[3].error.field == "key"


async def test_many_at_once_are_linearizable(cluster: Cluster, tmp_path: Path) -> None:
    """Of callers that all want the key absent one wins; each handle is replaced at most once."""
    async with running_shard(cluster, tmp_path) as shard:
        wanted = [request_of("one", if_absent=True) for _ in range(20)]
        results = await asyncio.gather(*(schedule(shard, each) for each in wanted))
        outcomes = sorted(result.outcome for [result] in results)
        assert outcomes == [timer_pb2.SCHEDULED] + [timer_pb2.EXISTS] * 19
        results = await asyncio.gather(*(schedule(shard, request_of("one")) for _ in range(20)))
        replaced = [result.replaced.offset for [result] in results]
        assert len(set(replaced)) == 20
        stats = await shard.stats()
        assert (stats.accepted, stats.replaced, stats.pending) == (21, 20, 1)


async def test_what_is_fired_by_hand_is_delivered_once_and_answers_fired(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with running_shard(cluster, tmp_path) as shard, aio.Producer(cluster.nameserver) as sends:
        receipt = await sends.send(TOPIC, b"1", delay="1h")
        keyed = await sends.send(TOPIC, b"2", delay="30d", timer_key="k")
        assert await sends.fire([receipt]) == [FireOutcome.FIRED]
        assert await sends.fire(key=(TOPIC, "k")) is FireOutcome.FIRED
        await shard.until(lambda stats: stats.fired == 2 and not stats.in_flight)
        assert await sends.fire([receipt, keyed]) == [FireOutcome.FIRED_BEFORE] * 2
        assert await sends.fire(key=(TOPIC, "k")) is FireOutcome.FIRED_BEFORE
        assert await sends.cancel([receipt, keyed]) == [CancelOutcome.FIRED] * 2
        assert await all_delivered(cluster) == [b"1", b"2"]
        request = timer_pb2.RescheduleRequest(
            request_id=secrets.token_bytes(16), fire_now=True, delays_ms=[5]
        )
        request.timers.add(key=timer_pb2.TimerKey(topic=TOPIC, key="k"))
        with pytest.raises(DuemqError) as raised:
            await status.answer(shard._stub.Reschedule(request, timeout=WAIT_S))
        assert raised.value.field == "fire_now"
    async with running_shard(cluster, tmp_path) as shard, aio.Producer(cluster.nameserver) as sends:
        assert await sends.cancel([receipt, keyed]) == [CancelOutcome.FIRED] * 2
        stats = await shard.stats()
        assert (stats.accepted, stats.fired, stats.replaced, stats.pending) == (4, 2, 2, 0)
