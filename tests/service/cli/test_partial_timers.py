"""One of two timer shards cannot say its part: every command that asks all of them says so."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from duemq.administering.timer_shards import AskingShards
from duemq.aio import Admin
from duemq.errors import PartialAnswer
from duemq.v1 import nameserver_pb2, stubs
from duemq_cli.exits import Exit
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import AWAY_S, WAIT_S, Cluster, running_cluster, until
from tests.service.test_timer_service import HOUR_MS, TOPIC, running_shard, send

WHY = {
    "away": "no timer service is alive for shard 1 of 2",
    "silent": "127.0.0.1:",
    "older": "it does not know this call",
}


async def register(cluster: Cluster, name: str, address: str, shard: int, shards: int) -> None:
    report = nameserver_pb2.TimerReport(
        name=name, address=address, shard=shard, shards=shards, store_id=9
    )
    request = nameserver_pb2.RegisterRequest(
        version=nameserver_pb2.Version(epoch=1, counter=1), timer=report
    )
    async with grpc.aio.insecure_channel(cluster.nameserver) as to:
        answer = await stubs.NameserverStub(to).Register(request)
    assert answer.accepted


def soon_given_up(monkeypatch: pytest.MonkeyPatch, away: str) -> None:
    """Questions to this shard end soon; the other may take as long as it needs."""
    ask = AskingShards._ask_or_miss

    async def asked(
        self: AskingShards, shard: Any, method: Any, missing: Any, timeout_s: float = 0.0
    ) -> Any:
        return await ask(self, shard, method, missing, AWAY_S if shard.name == away else WAIT_S)

    monkeypatch.setattr(AskingShards, "_ask_or_miss", asked)


@pytest.fixture(params=list(WHY))
async def shards(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[str, str]]:
    """t0 is there, t1 is not, or might as well not be: the nameserver, and what is wrong."""
    trouble = request.param
    soon_given_up(monkeypatch, "t1")
    async with (
        running_cluster(tmp_path, "b0") as cluster,
        running_shard(cluster, tmp_path, shard=0, shards=2) as shard,
        Admin(cluster.nameserver) as admin,
    ):
        await cluster.create_topic(TOPIC, queues=2)
        await send(cluster, [b"a"], [HOUR_MS], queue_id=0)
        await shard.until(lambda stats: stats.accepted == 1)
        await until(lambda: bool(admin._client.routes.timers))
        server = grpc.aio.server()
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        if trouble == "older":
            await server.start()
        if trouble != "away":
            await register(cluster, "t1", address, 1, 2)
            await until(lambda: len(admin._client.routes.timers) == 2)
        yield cluster.nameserver, trouble
        await server.stop(0)


@pytest.mark.parametrize(
    "command",
    [
        ("timer", "count"),
        ("timer", "histogram"),
        ("timer", "list", "--topic", TOPIC),
        ("schedule", "list"),
    ],
    ids=" ".join,
)
async def test_who_is_missing_is_said(shards: tuple[str, str], command: tuple[str, ...]) -> None:
    nameserver, trouble = shards
    people = await run(nameserver, "--timeout", "60", *command)
    assert people.exit_code == Exit.PARTIAL, people.stdout + people.stderr
    assert "duemq: incomplete, no answer of timer shard " in people.stderr
    programs = await run(nameserver, "--timeout", "60", *command, "--json")
    assert programs.exit_code == Exit.PARTIAL
    *found, last = rows(programs)
    missing = {each["broker"]: each["error"] for each in last["missing_brokers"]}
    named = {"away": "timer shard 1"}
    assert WHY[trouble] in missing[named.get(trouble, "timer shard 1 (t1)")]
    if command[0] == "timer":
        assert found  # what t0 has is shown


async def test_programs_get_the_part(shards: tuple[str, str]) -> None:
    nameserver, _ = shards
    async with Admin(nameserver) as admin:
        with pytest.raises(PartialAnswer) as raised:
            await admin.count_timers()
        assert raised.value.partial is not None
        with pytest.raises(PartialAnswer) as raised:
            await admin.schedules()
        assert raised.value.partial is not None
