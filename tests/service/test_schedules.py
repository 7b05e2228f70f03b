"""Schedules at real shards and brokers, in one process: names, answers, limits, loops."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duemq import aio
from duemq.descriptions import CatchUp, DstPolicy
from duemq.errors import (
    InvalidArgument,
    Overloaded,
    ScheduleNotFound,
    TooLarge,
    TopicNotFound,
)
from duemq.protocol.route import Queue
from duemq.protocol.timer_keys import shard_of_schedule
from duemq.transport import channel, status
from duemq.v1 import message_pb2, schedule_pb2, stubs
from duemq_server.timer_service.edge import broker_link, topic_queues
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_service import TOPIC, WAIT_S, delivered, running_shard


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0") as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


async def records(cluster: Cluster) -> list[message_pb2.Record]:
    return [each for queue in (await delivered(cluster)).values() for each in queue]


async def test_what_was_put_is_told(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path), aio.Admin(cluster.nameserver) as admin:
        outcome, made = await admin.put_schedule(
            "report",
            topic=TOPIC,
            body=b"go",
            cron="0 9 * * MON-FRI",
            zone="Europe/Berlin",
            dst="shift",
            catch_up="none",
            start="2030-01-01T00:00:00Z",
            until="2031-01-01T00:00:00Z",
            count=7,
            jitter="90s",
            key="k",
            tag="t",
            properties={"a": "b"},
        )
        assert outcome == "created"
        assert (made.topic, made.body, made.key, made.tag) == (TOPIC, b"go", "k", "t")
        assert made.properties == {"a": "b"}
        assert (made.cron, made.zone, made.every_ms) == ("0 9 * * MON-FRI", "Europe/Berlin", None)
        assert (made.dst, made.catch_up) == (DstPolicy.SHIFT, CatchUp.NONE)
        assert (made.start_ms, made.until_ms) == (1_893_456_000_000, 1_924_992_000_000)
        assert (made.count, made.jitter_ms, made.stored) == (7, 90_000, 1)
        assert await admin.schedule("report") == made
        assert await admin.schedules() == [made]
        found = await admin.next_occurrences("report", 1_000)
        assert len(found) == 7
        assert found[0].due_ms == made.next_due_ms
        assert found[0].at_ms == 1_893_484_800_000  # Tuesday, 2030-01-01T08:00Z


async def test_messages_come_with_what_was_given(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path), aio.Admin(cluster.nameserver) as admin:
        await admin.put_schedule(
            "beat", topic=TOPIC, body=b"beat", every="1s", count=2, key="k", properties={"a": "b"}
        )

        async def came() -> bool:
            return len(await records(cluster)) == 2

        await until(came)
        found = await records(cluster)
        assert {each.body for each in found} == {b"beat"}
        assert {each.key for each in found} == {"k"}
        assert len({each.message_id for each in found}) == 2
        for each in found:
            assert each.properties["a"] == "b"
            assert each.properties["duemq.schedule"] == "beat"
            assert int(each.properties["duemq.scheduled_ms"]) == each.due_ms == each.born_ms
        assert (await admin.schedule("beat")).ended


async def test_names_find_their_shard(cluster: Cluster, tmp_path: Path) -> None:
    names = [f"s{number:02}" for number in range(20)]
    async with (
        running_shard(cluster, tmp_path, name="t0", shard=0, shards=2),
        running_shard(cluster, tmp_path, name="t1", shard=1, shards=2) as other,
        aio.Admin(cluster.nameserver) as admin,
    ):
        await admin._client.wait_for(lambda routes: len(routes.timers) == 2, WAIT_S)
        for name in names:
            await admin.put_schedule(name, topic=TOPIC, every="1h")
        assert [each.name for each in await admin.schedules()] == names
        of_other = [each.name for each in other.service.shard.scheduler.schedules]
        assert sorted(of_other) == [name for name in names if shard_of_schedule(name, 2) == 1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "%x"}, "name"),
        ({"topic": "%TRACE%"}, "topic"),
        ({"every_ms": 999}, "every_ms"),
        ({"cron": "61 * * * *"}, "cron"),
        ({"zone": "UTC"}, "zone"),
        ({"dst": 9}, "dst"),
        ({"catch_up": 9}, "catch_up"),
        ({"count": -1}, "count"),
        ({"from_ms": 9, "until_ms": 8}, "until_ms"),
        ({"jitter_ms": -1}, "jitter_ms"),
        ({"record": message_pb2.Record(message_id="m")}, "record.message_id"),
        ({"record": message_pb2.Record(retry=message_pb2.Retry())}, "record.retry"),
    ],
)
async def test_what_is_wrong_is_named(
    cluster: Cluster, tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    given = {"topic": TOPIC, "every_ms": 1_000, "name": "s", **change}
    if "cron" in change:
        del given["every_ms"]
    name = given.pop("name")
    request = schedule_pb2.PutScheduleRequest(name=name, spec=schedule_pb2.ScheduleSpec(**given))
    async with running_shard(cluster, tmp_path) as shard:
        async with channel.connect(shard.service.server.advertised) as to:
            stub = stubs.SchedulesStub(to)
            with pytest.raises(InvalidArgument) as raised:
                await status.answer(stub.PutSchedule(request, timeout=WAIT_S))
        assert raised.value.field == field
        assert len(shard.service.shard.scheduler.schedules) == 0


async def test_a_topic_whose_route_is_on_its_way_is_waited_for(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_queues, "TOPIC_WAIT_S", 0.0)
    monkeypatch.setattr(broker_link, "TOPIC_S", WAIT_S)
    async with running_shard(cluster, tmp_path) as shard, aio.Admin(cluster.nameserver) as admin:
        links, asked = shard.service._links, Counter[str]()
        known = links.queues_of

        def late(topic: str) -> tuple[Queue, ...]:
            asked[topic] += 1
            return known(topic) if asked[topic] > 3 else ()  # so often it is looked for at first

        monkeypatch.setattr(links, "queues_of", late)
        with pytest.raises(TopicNotFound):
            await admin.put_schedule("s", topic="nowhere", every="1h")
        outcome, _ = await admin.put_schedule("s", topic=TOPIC, every="1h")
        assert outcome == "created"


async def test_what_is_too_much(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        running_shard(cluster, tmp_path, schedules_max=1),
        aio.Admin(cluster.nameserver) as admin,
    ):
        with pytest.raises(TooLarge, match="body"):
            await admin.put_schedule("s", topic=TOPIC, body=bytes(5 << 20), every="1s")
        with pytest.raises(TopicNotFound):
            await admin.put_schedule("s", topic="nowhere", every="1s")
        with pytest.raises(ScheduleNotFound, match="'s'"):
            await admin.pause_schedule("s")
        await admin.put_schedule("s", topic=TOPIC, every="1h")
        with pytest.raises(Overloaded, match="schedules_max"):
            await admin.put_schedule("other", topic=TOPIC, every="1h")


async def test_a_shard_without_schedules_sets_no_timer(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard, aio.Admin(cluster.nameserver) as admin:
        loop = shard.service.shard.schedule_loop
        assert loop._timer is None
        await admin.put_schedule("s", topic=TOPIC, every="1h", catch_up="all")
        await asyncio.sleep(0)
        assert loop._timer is None  # dispatch will tell
        await admin.delete_schedule("s")
        assert loop._timer is None


async def test_a_restart_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path), aio.Admin(cluster.nameserver) as admin:
        await admin.put_schedule("s", topic=TOPIC, every="1s", catch_up="all")
        await admin.put_schedule("paused", topic=TOPIC, every="1s")
        await admin.pause_schedule("paused")
    async with running_shard(cluster, tmp_path) as shard, aio.Admin(cluster.nameserver) as admin:

        async def came() -> bool:
            return len(await records(cluster)) >= 3

        await until(came)
        assert (await admin.schedule("paused")).paused
        await admin.pause_schedule("s")
        await shard.until(lambda stats: not stats.in_flight)
        times = sorted(each.due_ms for each in await records(cluster))
        assert times == list(range(times[0], times[-1] + 1, 1_000))
