"""What a timer shard holds, as users ask for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq.aio import Admin
from duemq.errors import PartialAnswer
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
    counted = {"topic": TOPIC, "pending": 2, "accepted": 4, "fired": 1, "cancelled": 1, "lost": 0}
    async with running_shard(cluster, tmp_path) as shard:
        handles = await send(cluster, [b"a", b"b", b"c", b"d"], [0, HOUR_MS, HOUR_MS, HOUR_MS])
        await shard.until(lambda stats: stats.fired == 1 and stats.accepted == 4)
        await shard.cancel(handles[1])
        done = await run(cluster.nameserver, "timer", "count", "--json")
        assert rows(done) == [counted]
        assert done.exit_code == Exit.OK
    async with running_shard(cluster, tmp_path) as shard:
        await until(lambda: bool(shard.service._registration))
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
