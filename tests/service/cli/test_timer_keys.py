"""`duemq send --timer-key`, `duemq timer cancel`, `duemq timer reschedule`, with a played shard."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq_cli.exits import Exit
from tests.service.cli.commands import rows, run
from tests.service.fake_cluster import FakeCluster
from tests.service.fake_keys import NOW_MS

TOPIC = "reminders"
KEY = ("--topic", TOPIC, "--timer-key")


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster()
    await cluster.start("a", timers=1)
    cluster.topic(TOPIC)
    yield cluster
    await cluster.stop()


async def sent(cluster: FakeCluster, key: str, *options: str) -> dict[str, object]:
    command = ("send", TOPIC, "b", "--delay", "1h", "--timer-key", key, "--json", *options)
    (row,) = rows(await run(cluster.nameserver, *command))
    return row


async def test_a_send_replaces_what_waits(cluster: FakeCluster) -> None:
    first = await sent(cluster, "k")
    assert first["replaced"] is None
    second = await sent(cluster, "k")
    assert second["replaced"] == first["handle"]
    done = await run(
        cluster.nameserver, "send", TOPIC, "b", "--at", "2030-01-31T09:00:00Z", "--timer-key", "k"
    )
    assert done.exit_code == 0
    assert f"instead of {second['handle']}" in done.stdout


async def test_if_absent_fails_and_says_what_is_there(cluster: FakeCluster) -> None:
    first = await sent(cluster, "k", "--if-absent")
    command = ("send", TOPIC, "b", "--delay", "5s", "--timer-key", "k", "--if-absent")
    done = await run(cluster.nameserver, *command, "--json")
    assert done.exit_code == Exit.FAILED
    (row,) = rows(done)
    assert (row["handle"], row["due_ms"]) == (first["handle"], first["due_ms"])
    assert row["error"]["code"] == "TIMER_EXISTS"
    assert "waits under it" in (await run(cluster.nameserver, *command)).stderr


async def test_keys_from_a_column(cluster: FakeCluster, tmp_path: Path) -> None:
    file = tmp_path / "orders.csv"
    file.write_text("id,body\n17,a\n18,b\n")
    options = ("--timer-key-column", "id", "--delay", "1h", "--json")
    done = await run(cluster.nameserver, "send", TOPIC, "--file", str(file), *options)
    assert [row["replaced"] for row in rows(done)] == [None, None]
    assert set(cluster.timers[0].keyed.waiting) == {(TOPIC, "17"), (TOPIC, "18")}


async def test_cancels_by_key(cluster: FakeCluster) -> None:
    await sent(cluster, "a")
    await sent(cluster, "b")
    done = await run(cluster.nameserver, "timer", "cancel", *KEY, "a", "--timer-key", "b", "--json")
    assert done.exit_code == 0
    assert rows(done) == [
        {"topic": TOPIC, "timer_key": key, "outcome": "cancelled"} for key in ("a", "b")
    ]
    done = await run(cluster.nameserver, "timer", "cancel", *KEY, "a")
    assert (done.exit_code, done.stdout) == (Exit.FAILED, "unknown  a\n")


async def test_reschedules_by_key_and_by_handle(cluster: FakeCluster) -> None:
    first = await sent(cluster, "k")
    by_key = ("timer", "reschedule", *KEY, "k", "--delay", "2h", "--json")
    (row,) = rows(await run(cluster.nameserver, *by_key))
    assert row["outcome"] == "rescheduled"
    assert row["due_ms"] == NOW_MS + 7_200_000
    assert row["handle"] != first["handle"]
    by_handle = ("timer", "reschedule", row["handle"], "--at", str(NOW_MS + 5))
    done = await run(cluster.nameserver, *by_handle)
    assert done.exit_code == 0
    assert done.stdout.startswith("rescheduled  due ")
    done = await run(cluster.nameserver, *by_handle, "--json")
    assert done.exit_code == Exit.FAILED
    assert rows(done) == [{"outcome": "unknown", "handle": None, "due_ms": None}]


async def test_what_was_done_is_printed_though_not_all_was(cluster: FakeCluster) -> None:
    first = await sent(cluster, "a")
    second = await sent(cluster, "b")
    cluster.timers[0].keyed.unanswered = [{1}] * 10_000
    command = ("timer", "fire", first["handle"], second["handle"], "--timeout", "3")
    done = await run(cluster.nameserver, *map(str, command), "--json")
    assert done.exit_code == Exit.UNAVAILABLE
    fired, error = rows(done)
    assert fired == {"handle": first["handle"], "outcome": "fired"}
    assert "another one is away" in error["error"]["message"]


@pytest.mark.parametrize(
    "command",
    [
        ("timer", "cancel"),
        ("timer", "cancel", "h", *KEY, "k"),
        ("timer", "cancel", "--topic", TOPIC),
        ("timer", "cancel", "--timer-key", "k"),
        ("timer", "cancel", *KEY, ""),
        ("timer", "fire"),
        ("timer", "fire", "h", *KEY, "k"),
        ("timer", "reschedule", "--delay", "1s"),
        ("timer", "reschedule", "h", *KEY, "k", "--delay", "1s"),
        ("timer", "reschedule", *KEY, "k"),
        ("timer", "reschedule", *KEY, "k", "--delay", "1s", "--at", "5"),
        ("timer", "reschedule", *KEY, "k", "--delay", "soon"),
        ("send", TOPIC, "b", "--timer-key", "k"),
        ("send", TOPIC, "b", "--delay", "1s", "--if-absent"),
    ],
    ids=" ".join,
)
async def test_wrong_usage(cluster: FakeCluster, command: tuple[str, ...]) -> None:
    done = await run(cluster.nameserver, *command, "--json")
    assert done.exit_code == Exit.USAGE
    assert "error" in json.loads(done.stdout)
    assert not cluster.timers[0].keyed.requests


async def test_fires_by_key_and_by_handle(cluster: FakeCluster) -> None:
    first, second = await sent(cluster, "a"), await sent(cluster, "b")
    by_key = ("timer", "fire", *KEY, "a", "--json")
    done = await run(cluster.nameserver, *by_key)
    assert (done.exit_code, rows(done)) == (
        0,
        [{"topic": TOPIC, "timer_key": "a", "outcome": "fired"}],
    )
    done = await run(cluster.nameserver, *by_key)
    assert (done.exit_code, rows(done)[0]["outcome"]) == (Exit.FAILED, "fired_before")
    handles = (str(second["handle"]), str(first["handle"]))
    done = await run(cluster.nameserver, "timer", "fire", *handles)
    assert done.exit_code == Exit.FAILED
    assert done.stdout == f"fired  {handles[0]}\nunknown  {handles[1]}\n"
