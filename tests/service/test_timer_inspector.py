"""What a timer shard holds, as users ask for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq.aio import Admin
from duemq.descriptions import TimerState
from duemq.errors import InvalidArgument, PartialAnswer, Unavailable
from duemq.producing.handle import encode
from duemq.settings import ClientSettings
from duemq.transport import channel, status
from duemq.v1.message_pb2 import TimerHandle
from duemq.v1.stubs import TimerInspectorStub
from duemq.v1.timer_inspector_pb2 import GetTimersRequest, ListTimersRequest
from duemq_cli.exits import Exit
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_service import HOUR_MS, TOPIC, running_shard, send


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0") as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


async def test_counts_are_exact_and_survive_a_restart(cluster: Cluster, tmp_path: Path) -> None:
    counted = {
        "topic": TOPIC,
        "pending": 2,
        "accepted": 4,
        "fired": 1,
        "cancelled": 1,
        "replaced": 0,
        "lost": 0,
        "held": 0,
        "dropped": 0,
    }
    async with running_shard(cluster, tmp_path) as shard:
        await shard.registered()
        handles = await send(cluster, [b"a", b"b", b"c", b"d"], [0, HOUR_MS, HOUR_MS, HOUR_MS])
        await shard.until(lambda stats: stats.fired == 1 and stats.accepted == 4)
        await shard.cancel(handles[1])
        done = await run(cluster.nameserver, "timer", "count", "--json")
        assert rows(done) == [counted]
        assert done.exit_code == Exit.OK
    async with running_shard(cluster, tmp_path) as shard:
        await shard.registered()
        done = await run(cluster.nameserver, "timer", "count", "--topic", TOPIC, "--json")
        assert rows(done)[0] == counted
        nothing = await run(cluster.nameserver, "timer", "count", "--topic", "none", "--json")
        assert [(each["topic"], each["accepted"]) for each in rows(nothing)] == [("none", 0)]


async def test_a_shard_that_is_away_is_named(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        Admin(cluster.nameserver) as admin,
        running_shard(cluster, tmp_path, shard=0, shards=2) as shard,
    ):
        await send(cluster, [b"a"], [HOUR_MS], queue_id=0)
        await until(lambda: bool(admin._client.routes.timers))
        with pytest.raises(PartialAnswer, match="timer shard 1") as raised:
            await admin.count_timers()
        assert raised.value.partial is not None
        done = await run(cluster.nameserver, "timer", "count", "--json")
        assert done.exit_code == Exit.PARTIAL
        assert rows(done)[-1]["missing_brokers"][0]["broker"] == "timer shard 1"
        await shard.until(lambda stats: stats.accepted <= 1)


async def test_topics_have_metrics(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        await shard.registered()
        await send(cluster, [b"a", b"b"], [0, HOUR_MS])
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
        registry = shard.service.server.registry
        value = registry.get_sample_value
        assert value("duemq_timer_topic_pending", {"topic": TOPIC}) == 1
        assert value("duemq_timer_topic_fired_total", {"topic": TOPIC}) == 1
        # What was due when it was accepted has no lateness.
        await send(cluster, [b"c"], [30])
        await shard.until(lambda stats: stats.fired == 2 and not stats.in_flight)
        counted = value("duemq_timer_topic_lateness_ms_bucket", {"topic": TOPIC, "le": "+Inf"})
        assert counted is not None
        assert counted >= 1


async def test_what_falls_due_when(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path, memtable_rows_max=64) as shard:
        await shard.registered()
        await send(cluster, [b"x"] * 200, [HOUR_MS + n for n in range(200)])
        await send(cluster, [b"y"] * 3, [10 * HOUR_MS] * 3)
        await shard.until(lambda stats: stats.accepted == 203 and stats.near == 0)
        async with Admin(cluster.nameserver) as admin:
            found = await admin.timer_histogram(TOPIC)
            assert sum(each.pending for each in found) == 203
            assert found[-1].pending == 3
            assert found[-1].to_ms - found[-1].from_ms == 60_000
            assert await admin.timer_histogram("none") == []
        done = await run(cluster.nameserver, "timer", "histogram", "--json")
        assert sum(each["pending"] for each in rows(done)) == 203
        drawn = await run(cluster.nameserver, "timer", "histogram")
        assert "█" * 40 in drawn.stdout


def text(handle: TimerHandle) -> str:
    return encode(handle.store_id, handle.queue_id, handle.offset, handle.due_ms)


async def test_what_the_other_shards_say_is_shown_where_one_is_away(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with (
        running_shard(cluster, tmp_path, shard=0, shards=2) as shard,
        Admin(cluster.nameserver, settings=ClientSettings(away_timeout_s=0.2)) as admin,
    ):
        away, *_ = await send(cluster, [b"b"], [HOUR_MS], queue_id=1)
        here, *_ = await send(cluster, [b"a"], [HOUR_MS], queue_id=0)
        assert [each.queue_id % 2 for each in (away, here)] == [1, 0]
        await shard.until(lambda stats: stats.accepted == 1)
        await until(lambda: bool(admin._client.routes.timers))
        asked = [text(away), text(here)]
        with pytest.raises(Unavailable) as raised:
            await admin.get_timers(asked)
        assert {at: each.body for at, each in raised.value.answers.items()} == {1: b"a"}
        done = await run(cluster.nameserver, "timer", "get", *asked, "--json")
        assert done.exit_code == Exit.UNAVAILABLE
        shown, error = rows(done)
        assert shown["handle"] == text(here)
        assert error["error"]["code"] == "UNAVAILABLE"


async def test_timers_are_found_by_handle(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path, memtable_rows_max=64) as shard:
        await shard.registered()
        await send(cluster, [b"x"] * 100, [2 * HOUR_MS] * 100)
        handles = await send(cluster, [b"a", b"b", b"\xff"], [0, HOUR_MS, HOUR_MS])
        await shard.until(lambda stats: stats.fired == 1 and stats.accepted == 103)
        await shard.cancel(handles[1])
        unknown = TimerHandle()
        unknown.CopyFrom(handles[2])
        unknown.due_ms += 1
        asked = [text(each) for each in (*handles, unknown)]
        async with Admin(cluster.nameserver) as admin:
            found = await admin.get_timers(asked)
            states = [TimerState.FIRED, TimerState.CANCELLED, TimerState.PENDING]
            assert [each.state for each in found] == [*states, TimerState.UNKNOWN]
            assert [each.body for each in found] == [None, None, b"\xff", None]
            assert (found[2].topic, found[2].due_ms) == (TOPIC, handles[2].due_ms)
            with pytest.raises(InvalidArgument):
                await admin.get_timers(["dmq1no"])
        done = await run(cluster.nameserver, "timer", "get", *asked, "--json")
        assert done.exit_code == Exit.FAILED
        assert [each["state"] for each in rows(done)][:2] == ["fired", "cancelled"]
        assert rows(done)[2]["body_base64"] == "/w=="
        done = await run(cluster.nameserver, "timer", "get", asked[2])
        assert done.exit_code == Exit.OK
        assert done.stdout.startswith("pending")


async def test_a_topic_s_timers_are_listed_in_due_order(cluster: Cluster, tmp_path: Path) -> None:
    """Of two shards."""
    async with (
        running_shard(cluster, tmp_path, shard=0, shards=2, memtable_rows_max=64) as one,
        running_shard(cluster, tmp_path, name="t1", shard=1, shards=2) as other,
        Admin(cluster.nameserver) as admin,
    ):
        await until(lambda: len(admin._client.routes.timers) == 2)
        handles = []
        for n in range(8):
            delays_ms = [HOUR_MS + (n * 7 + 3 * each) % 50 for each in range(40)]
            handles += await send(cluster, [b"x"] * 40, delays_ms, queue_id=n % 2)

        async def arrived() -> bool:
            return sum([(await each.stats()).accepted for each in (one, other)]) == len(handles)

        await until(arrived)
        assert all([(await each.stats()).pending for each in (one, other)])
        expected = sorted(each.due_ms for each in handles)
        found = [each async for each in admin.list_timers(TOPIC)]
        assert [each.due_ms for each in found] == expected
        assert {each.handle for each in found} == {text(each) for each in handles}
        some = [each async for each in admin.list_timers(TOPIC, limit=5, bodies=True)]
        assert [(each.due_ms, each.body) for each in some] == [(at, b"x") for at in expected[:5]]
        since, before = expected[100], expected[200]
        part = [each.due_ms async for each in admin.list_timers(TOPIC, since=since, until=before)]
        assert part == [each for each in expected if since <= each < before]
        assert [each async for each in admin.list_timers(TOPIC, key_prefix="k")] == []
        done = await run(
            cluster.nameserver, "timer", "list", "--topic", TOPIC, "--limit", "3", "--json"
        )
        assert [each["due_ms"] for each in rows(done)] == expected[:3]
        assert rows(done)[0].keys() == {"handle", "timer_key", "topic", "key", "due_ms", "state"}
        shown = await run(cluster.nameserver, "timer", "list", "--topic", TOPIC)
        assert shown.exit_code == Exit.OK
        few = ("timer", "list", "--topic", TOPIC, "--limit")
        assert "more than 3: " in (await run(cluster.nameserver, *few, "3")).stderr
        whole = await run(cluster.nameserver, *few, str(len(expected)))
        assert "more than" not in whole.stderr


async def test_a_list_without_a_shard_says_so(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path, shard=0, shards=2) as shard:
        await shard.registered()
        done = await run(cluster.nameserver, "timer", "list", "--topic", TOPIC, "--json")
        assert done.exit_code == Exit.PARTIAL
        assert "timer shard 1" in done.stdout


async def test_what_cannot_be_asked_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        running_shard(cluster, tmp_path) as shard,
        channel.connect(shard.service.server.address) as connection,
    ):
        stub = TimerInspectorStub(connection)
        for wrong in (
            ListTimersRequest(limit=1),
            ListTimersRequest(topic=TOPIC),
            ListTimersRequest(topic=TOPIC, limit=1_001),
            ListTimersRequest(topic=TOPIC, limit=1, token=b"x"),
            ListTimersRequest(topic=TOPIC, limit=1, from_ms=-1),
        ):
            with pytest.raises(InvalidArgument):
                await status.answer(stub.ListTimers(wrong))
        with pytest.raises(InvalidArgument, match="handles"):
            await status.answer(stub.GetTimers(GetTimersRequest()))
