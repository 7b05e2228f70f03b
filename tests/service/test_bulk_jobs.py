"""What is pending of a topic, cancelled and shifted as users ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from duemq.aio import Admin, Producer
from duemq.errors import InvalidArgument, PartialAnswer, TopicNotFound, Unavailable
from duemq.protocol.timer_keys import shard_of
from duemq.transport import channel, status
from duemq.v1.stubs import TimerStub
from duemq.v1.timer_pb2 import ChangePendingRequest
from duemq_cli.exits import Exit
from duemq_server.timer_service.bulk_loop import BulkLoop
from duemq_server.timer_service.scheduling.bulk.jobs import BulkJobs, Job, Which
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_service import HOUR_MS, TOPIC, running_shard, send

KEYS = [f"{owner}/{n}" for owner in ("ann", "bob") for n in range(6)]
ID = bytes(range(16))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0") as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


async def dues(admin: Admin, **which: Any) -> list[int]:
    return [each.due_ms async for each in admin.list_timers(TOPIC, **which)]


async def test_timers_are_cancelled_and_shifted_by_key_prefix_at_all_shards(
    cluster: Cluster, tmp_path: Path
) -> None:
    assert {shard_of(TOPIC, key, 2) for key in KEYS} == {0, 1}
    async with (
        running_shard(cluster, tmp_path, shard=0, shards=2) as one,
        running_shard(cluster, tmp_path, name="t1", shard=1, shards=2) as other,
        Admin(cluster.nameserver) as admin,
        Producer(cluster.nameserver) as producer,
    ):
        await one.registered()
        await other.registered()
        await until(lambda: len(admin._client.routes.timers) == 2)
        await producer.send(TOPIC, b"plain", delay="2h")
        for key in KEYS:
            await producer.send(TOPIC, key.encode(), delay="1h", timer_key=key)
        before = await dues(admin, key_prefix="bob/")

        assert await admin.shift_pending(TOPIC, "30m", key_prefix="bob/", dry_run=True) == 6
        assert await dues(admin, key_prefix="bob/") == before
        assert await admin.shift_pending(TOPIC, "30m", key_prefix="bob/", request_id=ID) == 6
        assert await admin.shift_pending(TOPIC, "30m", key_prefix="bob/", request_id=ID) == 6
        later = [due_ms + HOUR_MS // 2 for due_ms in before]
        assert await dues(admin, key_prefix="bob/") == later
        with pytest.raises(InvalidArgument, match="had this id"):
            await admin.cancel_pending(TOPIC, request_id=ID)

        assert await admin.cancel_pending(TOPIC, key_prefix="ann/", dry_run=True) == 6
        assert await admin.cancel_pending(TOPIC, key_prefix="ann/") == 6
        assert len(await dues(admin)) == 7
        assert await admin.cancel_pending(TOPIC, until=later[0]) == 0
        assert await admin.cancel_pending(TOPIC, since=later[0], until=later[-1] + 1) == 6
        [count] = await admin.count_timers(TOPIC)
        assert (count.pending, count.cancelled, count.replaced) == (1, 12, 6)


async def test_what_would_be_due_by_now_is_due_at_once(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard, Admin(cluster.nameserver) as admin:
        await shard.registered()
        [handle] = await send(cluster, [b"a"], [HOUR_MS])
        await shard.until(lambda stats: stats.accepted == 1)
        await until(lambda: bool(admin._client.routes.timers))

        assert await admin.shift_pending(TOPIC, timedelta(hours=-2)) == 1
        await shard.until(lambda stats: stats.fired == 1)
        [result] = await shard.cancel(handle)
        assert result.outcome == 1  # it was shifted: by this handle it is never delivered


async def test_what_waits_for_a_topic_that_was_deleted_goes_elsewhere(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Also what is overdue; with its own due time."""
    async with (
        running_shard(cluster, tmp_path) as shard,
        Admin(cluster.nameserver) as admin,
        Producer(cluster.nameserver) as producer,
    ):
        await shard.registered()
        await until(lambda: bool(admin._client.routes.timers))
        await admin.hold_timers(TOPIC)  # nothing of it is due before the topic is gone
        [soon] = await send(cluster, [b"soon"], [0])
        await send(cluster, [b"later"], [HOUR_MS])
        await producer.send(TOPIC, b"own", delay="1h", timer_key="own")
        await shard.until(lambda stats: stats.accepted == 3)
        await admin.delete_topic(TOPIC)
        await cluster.create_topic("elsewhere", queues=1)
        await admin.resume_timers(TOPIC)
        await shard.until(lambda stats: [each.timers for each in stats.stuck] == [1])
        assert "held" not in (await shard.stats()).stuck[0].reason

        assert await admin.move_pending(TOPIC, "elsewhere", dry_run=True) == 2
        assert await admin.move_pending(TOPIC, "elsewhere") == 2
        await shard.until(lambda stats: stats.fired == 1)
        client = cluster.clients["b0"]
        response = await client.pull("elsewhere", wait_ms=30_000)
        [pulled] = response.queues
        [record] = pulled.records.records
        assert (record.body, record.due_ms) == (b"soon", soon.due_ms)
        assert len([each async for each in admin.list_timers("elsewhere")]) == 1
        [left] = [each async for each in admin.list_timers(TOPIC)]
        assert left.timer_key == "own"
        counts = {each.topic: each for each in await admin.count_timers()}
        assert (counts[TOPIC].pending, counts[TOPIC].replaced) == (1, 2)
        assert (counts["elsewhere"].accepted, counts["elsewhere"].pending) == (2, 1)


async def test_where_to_move_is_checked(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard, Admin(cluster.nameserver) as admin:
        await shard.registered()
        await until(lambda: bool(admin._client.routes.timers))
        for wrong in (TOPIC, "%RETRY%g", "", "a b"):
            with pytest.raises(InvalidArgument, match="to_topic"):
                await admin.move_pending(TOPIC, wrong)
        for dry_run in (True, False):
            with pytest.raises(TopicNotFound, match="nowhere") as caught:
                await admin.move_pending(TOPIC, "nowhere", dry_run=dry_run)
            assert (caught.value.field, caught.value.value) == ("to_topic", "nowhere")


async def test_a_shard_that_is_away_is_named(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        running_shard(cluster, tmp_path, shard=0, shards=2) as shard,
        Admin(cluster.nameserver) as admin,
    ):
        await send(cluster, [b"a"], [HOUR_MS], queue_id=0)
        await shard.until(lambda stats: stats.accepted == 1)
        await until(lambda: bool(admin._client.routes.timers))
        with pytest.raises(PartialAnswer, match="timer shard 1") as raised:
            await admin.cancel_pending(TOPIC)
        assert raised.value.partial == 1
        again = ("timer", "cancel", "--topic", TOPIC, "--all", "--json")
        done = await run(cluster.nameserver, *again)
        assert done.exit_code == Exit.PARTIAL
        told = rows(done)[0]
        assert bytes.fromhex(told.pop("request_id"))
        assert told == {"count": 0, "dry_run": False}


async def test_a_shift_goes_on_under_its_id_and_shifts_nothing_twice(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with (
        running_shard(cluster, tmp_path, shard=0, shards=2) as shard,
        Admin(cluster.nameserver) as admin,
    ):
        await send(cluster, [b"a"], [HOUR_MS], queue_id=0)
        await shard.until(lambda stats: stats.accepted == 1)
        await until(lambda: bool(admin._client.routes.timers))

        async def due_ms() -> int:
            return (await anext(admin.list_timers(TOPIC))).due_ms

        before = await due_ms()
        shift = ("timer", "shift", "--topic", TOPIC, "--by", "1h", "--yes", "--from", "-1h")
        done = await run(cluster.nameserver, *shift)
        assert done.exit_code == Exit.PARTIAL
        assert "1 messages shifted" in done.stdout
        assert await due_ms() == before + HOUR_MS
        [told] = [line for line in done.stderr.splitlines() if "--request-id" in line]
        words = told.partition(": without")[0].split()
        go_on = words[words.index("--request-id") :]  # as it is told
        done = await run(cluster.nameserver, *shift, *go_on)
        assert done.exit_code == Exit.PARTIAL
        assert "1 messages shifted" in done.stdout
        assert await due_ms() == before + HOUR_MS
        for wrong in ("ab", "0" * 32, "x" * 32):
            refused = await run(cluster.nameserver, *shift, "--request-id", wrong)
            assert refused.exit_code == Exit.USAGE


async def test_the_commands(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path, memtable_rows_max=64) as shard:
        await shard.registered()
        await send(cluster, [b"x"] * 200, [HOUR_MS] * 200)
        await shard.until(lambda stats: stats.accepted == 200)

        async def command(*words: str) -> Any:
            return await run(cluster.nameserver, "timer", *words)

        shift = ("shift", "--topic", TOPIC, "--by", "-30m")
        done = await command(*shift, "--dry-run")
        assert "200 messages would be shifted" in done.stdout
        [row] = rows(await command(*shift, "--json"))
        assert row == {"count": 200, "dry_run": False}
        await cluster.create_topic("elsewhere", queues=1)
        move = ("move", "--topic", TOPIC, "--to-topic", "elsewhere")
        assert "200 messages would be moved" in (await command(*move, "--dry-run")).stdout
        assert rows(await command(*move, "--json")) == [{"count": 200, "dry_run": False}]
        back = ("move", "--topic", "elsewhere", "--to-topic", TOPIC, "--yes")
        assert "200 messages moved" in (await command(*back)).stdout
        done = await command("cancel", "--topic", TOPIC, "--all", "--yes")
        assert "200 messages cancelled" in done.stdout
        assert done.exit_code == Exit.OK
        for wrong in (
            ("cancel", "--all"),
            ("cancel", "--topic", TOPIC, "--all", "--key-prefix", "a"),
            ("cancel", "--topic", TOPIC, "--timer-key", "k", "--dry-run"),
            ("cancel", "h", "--topic", TOPIC, "--all"),
            ("shift", "--topic", TOPIC, "--by", "0s"),
            ("shift", "--topic", TOPIC, "--by", "soon"),
            ("shift", "--by", "1h"),
            ("move", "--topic", TOPIC),
            ("move", "--topic", TOPIC, "--to-topic", "elsewhere", "--key-prefix", "a"),
        ):
            assert (await command(*wrong)).exit_code == Exit.USAGE, wrong


async def test_behind_a_job_that_has_failed_nobody_waits(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, failed = asyncio.Event(), asyncio.Event()

    async def fail(self: BulkLoop, walk: object) -> None:
        reached.set()
        await failed.wait()
        raise Unavailable("it leads no more")

    monkeypatch.setattr(BulkLoop, "_work", fail)
    async with running_shard(cluster, tmp_path) as shard:
        bulk = shard.service.shard.bulk
        which = Which(TOPIC, "", 0, 1, None)
        waiting = [
            asyncio.create_task(bulk.change(bytes([each]) * 16, which, 600.0)) for each in range(2)
        ]
        await reached.wait()
        failed.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], Job)
    assert results[0].over_ms == 0
    assert isinstance(results[1], Unavailable)


async def test_a_job_that_comes_at_the_moment_that_another_one_is_over_is_done(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = asyncio.Event()

    def finish(jobs: BulkJobs, *how: Any, finish: Any = BulkJobs.finish) -> None:
        finish(jobs, *how)
        over.set()

    monkeypatch.setattr(BulkJobs, "finish", finish)
    async with running_shard(cluster, tmp_path) as shard:
        bulk = shard.service.shard.bulk
        which = Which(TOPIC, "", 0, 1, None)
        first = asyncio.create_task(bulk.change(bytes([1]) * 16, which, 600.0))
        await over.wait()

        async def is_over() -> bool:
            second = await bulk.change(bytes([2]) * 16, which, 0.0)
            return second is not None and second.over_ms > 0

        await until(is_over)
        await first


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("topic", {"topic": ""}),
        ("key_prefix", {"key_prefix": "a\0"}),
        ("from_ms", {"from_ms": -1}),
        ("to_ms", {"from_ms": 5, "to_ms": 5}),
        ("shift_ms", {"shift_ms": 0}),
        ("shift_ms", {"shift_ms": 1 << 60}),
        ("change", {"cancel": False}),
        ("to_topic", {"to_topic": TOPIC}),
        ("key_prefix", {"to_topic": "elsewhere", "key_prefix": "a/"}),
        ("request_id", {"request_id": b"short"}),
    ],
)
async def test_what_is_wrong_is_named(
    cluster: Cluster, tmp_path: Path, field: str, wrong: dict[str, Any]
) -> None:
    given = {"topic": TOPIC, "request_id": ID, **wrong}
    if not {"shift_ms", "cancel", "to_topic"} & given.keys():
        given["cancel"] = True
    async with (
        running_shard(cluster, tmp_path) as shard,
        channel.connect(shard.service.server.advertised) as connection,
    ):
        with pytest.raises(InvalidArgument) as raised:
            await status.answer(TimerStub(connection).ChangePending(ChangePendingRequest(**given)))
    assert raised.value.field == field


@pytest.mark.parametrize("by", [0, "0s", "soon", timedelta(), None, float("nan")])
async def test_a_time_to_shift_by_is_checked(cluster: Cluster, by: Any) -> None:
    async with Admin(cluster.nameserver) as admin:
        with pytest.raises(InvalidArgument, match="by"):
            await admin.shift_pending(TOPIC, by)
