"""Delayed messages that are kept back, at real shards and brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq import CancelOutcome, aio
from duemq.aio import Admin
from duemq.descriptions import TimerState
from duemq.errors import Corrupt, InvalidArgument, Overloaded, PartialAnswer
from duemq.protocol.timer_keys import shard_of
from duemq.transport import channel, status
from duemq.v1 import stubs, timer_holds_pb2
from duemq_cli.exits import Exit
from duemq_server.timer_service.scheduling.holding import changes
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_service import (
    HOUR_MS,
    TOPIC,
    WAIT_S,
    Shard,
    bodies_of,
    delivered,
    running_shard,
    send,
)

OTHER = "other"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0") as running:
        await running.create_topic(TOPIC, queues=2)
        await running.create_topic(OTHER, queues=1)
        yield running


async def registered(shard: Shard, admin: Admin | None = None) -> None:
    await shard.registered()
    if admin is not None:
        name = shard.service.settings.name
        await until(lambda: name in [each.name for each in admin._client.routes.timers])


async def held(admin: Admin, topic: str = TOPIC) -> int:
    return (await admin.count_timers(topic))[0].held


async def until_held(admin: Admin, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while await held(admin) != count:
            pass


async def test_a_topic_is_held_over_a_restart_and_goes_when_it_is_resumed(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with running_shard(cluster, tmp_path) as shard, Admin(cluster.nameserver) as admin:
        await registered(shard, admin)
        await send(cluster, [b"a", b"b"], [HOUR_MS, HOUR_MS])
        await shard.until(lambda stats: stats.accepted == 2)
        dry = await admin.hold_timers(TOPIC, dry_run=True)
        assert (dry.pending, dry.was_held) == (2, False)
        assert await admin.timer_holds() == []
        assert (await admin.hold_timers(TOPIC)).pending == 2
        assert (await admin.hold_timers(TOPIC)).was_held
        [late, _] = await send(cluster, [b"c", b"d"], [1, 1])
        await shard.until(lambda stats: stats.accepted == 4)
        await until_held(admin, 2)
        [found] = [each async for each in admin.list_timers(TOPIC, limit=1)]
        assert found.state is TimerState.HELD
        states = [each.state async for each in admin.list_timers(TOPIC)]
        assert states == [TimerState.HELD] * 2 + [TimerState.PENDING] * 2
        assert await shard.cancel(late)
        assert await held(admin) == 1
        sample = shard.service.server.registry.get_sample_value
        assert sample("duemq_timer_held") == 1
    async with running_shard(cluster, tmp_path) as shard, Admin(cluster.nameserver) as admin:
        await registered(shard, admin)
        await until_held(admin, 1)
        [there] = await admin.timer_holds()
        assert (there.topic, there.key_prefix) == (TOPIC, "")
        assert (await shard.stats()).fired == 0
        [waits] = (await shard.stats()).stuck
        assert "held" in waits.reason
        answer = await admin.resume_timers(TOPIC)
        assert (answer.pending, answer.was_held) == (3, True)
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
        assert not (await admin.resume_timers(TOPIC)).was_held
        assert await held(admin) == 0
        assert await admin.timer_holds() == []


async def test_keys_of_a_topic_are_held(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        running_shard(cluster, tmp_path) as shard,
        Admin(cluster.nameserver) as admin,
        aio.Producer(cluster.nameserver) as sends,
    ):
        await registered(shard, admin)
        assert (await admin.hold_timers(TOPIC, key_prefix="a/")).pending == 0
        for key in ("a/1", "a/2", "b/1"):
            await sends.send(TOPIC, key.encode(), timer_key=key, delay=0)
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
        await until_held(admin, 2)
        assert await sends.cancel(key=(TOPIC, "a/1")) is CancelOutcome.CANCELLED
        assert await held(admin) == 1
        answer = await admin.resume_timers(TOPIC, key_prefix="a/")
        assert (answer.pending, answer.was_held) == (1, True)
        await shard.until(lambda stats: stats.fired == 2 and not stats.in_flight)
        assert sorted(bodies_of(await delivered(cluster, "b0"))) == [b"a/2", b"b/1"]


async def test_a_shard_that_is_away_makes_the_answer_partial(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with (
        Admin(cluster.nameserver) as admin,
        running_shard(cluster, tmp_path, name="t0", shard=0, shards=2) as first,
        aio.Producer(cluster.nameserver) as sends,
    ):
        await registered(first, admin)
        with pytest.raises(PartialAnswer, match="timer shard 1"):
            await admin.hold_timers(TOPIC)
        options = ("--topic", TOPIC, "--json")
        done = await run(cluster.nameserver, "timer", "hold", *options)
        assert done.exit_code == Exit.PARTIAL
        assert rows(done)[0] == {"count": 0, "was_held": True, "topic_known": True}
        assert rows(done)[-1]["missing_brokers"][0]["broker"] == "timer shard 1"
        resume = await run(cluster.nameserver, "timer", "resume", *options, "--dry-run")
        assert resume.exit_code == Exit.PARTIAL
        assert not rows(resume)[0]["done"]  # what that one has to drop nobody knows
        async with running_shard(cluster, tmp_path, name="t1", shard=1, shards=2) as second:
            await registered(second, admin)
            again = await admin.hold_timers(TOPIC)
            assert (again.pending, again.was_held) == (0, True)  # it asked the other one
            for key in ("k0", "k1", "k2", "k3", "k4", "k5"):
                await sends.send(TOPIC, b"x", timer_key=key, delay=0)
            assert {shard_of(TOPIC, f"k{n}", 2) for n in range(6)} == {0, 1}
            await until_held(admin, 6)
            assert (await first.stats()).fired + (await second.stats()).fired == 0


async def test_too_many_holds_are_refused_and_that_is_no_part_of_an_answer(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "HOLDS_MAX", 1)
    async with running_shard(cluster, tmp_path) as shard, Admin(cluster.nameserver) as admin:
        await registered(shard, admin)
        await admin.hold_timers(TOPIC)
        with pytest.raises(Overloaded, match="1 holds are in force"):
            await admin.hold_timers("another")
        done = await run(cluster.nameserver, "timer", "hold", "--topic", "another")
        assert done.exit_code == Exit.UNAVAILABLE
        assert done.stdout == ""


async def test_what_is_too_old_or_not_the_newest_is_dropped(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with (
        running_shard(cluster, tmp_path) as shard,
        Admin(cluster.nameserver) as admin,
        aio.Producer(cluster.nameserver) as sends,
    ):
        await registered(shard, admin)
        await admin.hold_timers(TOPIC)
        for body, key in ((b"1", "k"), (b"2", "k"), (b"3", None), (b"4", "l")):
            await sends.send(TOPIC, body, key=key, delay=0.05)
        await until_held(admin, 4)
        answer = await admin.resume_timers(TOPIC, policy="newest")
        assert (answer.was_held, answer.dropped, answer.done) == (True, 1, True)
        await shard.until(lambda stats: stats.fired == 3 and not stats.in_flight)
        await admin.hold_timers(TOPIC)
        receipt = await sends.send(TOPIC, b"old", delay=0)
        await sends.send(TOPIC, b"later", delay="1h")
        await until_held(admin, 1)
        command = ("timer", "resume", "--topic", TOPIC, "--policy", "drop-older-than", "0s")
        would = await run(cluster.nameserver, *command, "--dry-run")
        assert would.stdout.startswith("2 delayed messages under it; how many of them are dropped")
        done = await run(cluster.nameserver, *command)
        assert done.stdout == "1 dropped; the others of 2 delayed messages go when they are due\n"
        assert await sends.cancel(receipt) is CancelOutcome.CANCELLED
        [count] = await admin.count_timers(TOPIC)
        assert (count.accepted, count.pending, count.fired, count.dropped) == (6, 1, 3, 2)
        assert b"1" not in bodies_of(await delivered(cluster))
        again = await run(cluster.nameserver, *command, "--json")
        assert rows(again) == [{"count": 1, "was_held": False, "dropped": 0, "done": True}]
        with pytest.raises(InvalidArgument, match="older_than"):
            await admin.resume_timers(TOPIC, policy="drop_older_than")
        with pytest.raises(InvalidArgument, match="policy"):
            await admin.resume_timers(TOPIC, policy="some")


async def test_keys_are_held_and_resumed_though_not_all_can_be_counted(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a file cannot be read: how many are pending is not told, and all else is done."""

    async def count(*_: object) -> None:
        raise Corrupt("a block")

    async with running_shard(cluster, tmp_path) as shard, Admin(cluster.nameserver) as admin:
        await registered(shard, admin)
        monkeypatch.setattr(shard.service.shard.bulk, "count", count)
        holds = shard.service.shard.scheduler.holds
        answer = await admin.hold_timers(TOPIC, key_prefix="a/")
        assert (answer.pending, answer.was_held, len(holds)) == (None, False, 1)
        with pytest.raises(PartialAnswer, match="a block"):
            await admin.resume_timers(TOPIC, key_prefix="a/", dry_run=True)
        answer = await admin.resume_timers(TOPIC, key_prefix="a/")
        assert (answer.pending, answer.was_held, len(holds)) == (None, True, 0)


async def test_the_command_line(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        await registered(shard)
        await send(cluster, [b"a"], [HOUR_MS])
        await shard.until(lambda stats: stats.accepted == 1)

        async def said(*command: str) -> str:
            done = await run(cluster.nameserver, "timer", *command)
            assert done.exit_code == Exit.OK
            return done.stdout

        on = ("--topic", TOPIC)
        assert await said("hold", *on, "--dry-run") == "1 delayed messages would be held\n"
        assert await said("hold", *on) == "1 delayed messages held\n"
        assert await said("hold", *on) == "1 delayed messages held (held before)\n"
        assert TOPIC in await said("holds")
        assert "held" in (await said("count")).splitlines()[0]
        await said("hold", "--topic", OTHER, "--key-prefix", "a/")
        found = rows(await run(cluster.nameserver, "timer", "holds", "--json"))
        assert [(each["topic"], each["key_prefix"]) for each in found] == [
            (TOPIC, ""),
            (OTHER, "a/"),
        ]
        assert await said("resume", *on, "--dry-run") == (
            "1 delayed messages would go when they are due\n"
        )
        assert await said("resume", *on) == "1 delayed messages go when they are due\n"
        assert "not held" in await said("resume", *on)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (timer_holds_pb2.HoldTimersRequest(), "topic"),
        (timer_holds_pb2.HoldTimersRequest(topic="a b"), "topic"),
        (timer_holds_pb2.HoldTimersRequest(topic="%RETRY%g", key_prefix="a"), "topic"),
        (timer_holds_pb2.HoldTimersRequest(topic="t", key_prefix="a\n"), "key_prefix"),
        (timer_holds_pb2.HoldTimersRequest(topic="t", key_prefix="a" * 256), "key_prefix"),
    ],
)
async def test_what_is_wrong_is_named(
    cluster: Cluster, tmp_path: Path, request_: timer_holds_pb2.HoldTimersRequest, field: str
) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        await registered(shard)
        async with channel.connect(shard.service.server.address) as to:
            stub = stubs.TimerHoldsStub(to)
            with pytest.raises(InvalidArgument) as raised:
                await status.answer(stub.HoldTimers(request_))
        assert raised.value.field == field
