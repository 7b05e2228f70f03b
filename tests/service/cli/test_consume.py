"""How `duemq consume` ends."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq_cli.exits import Exit
from tests.service.cli.commands import rows, run, start
from tests.service.running_cluster import Cluster, running_cluster

IDLE = ("--group", "g", "--from", "earliest", "--idle-timeout", "0.5")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0") as cluster:
        yield cluster


async def test_a_topic_that_is_not_there_is_said_at_once_and_told_by_the_exit_code(
    cluster: Cluster,
) -> None:
    people = await run(cluster.nameserver, "consume", "nosuch", *IDLE)
    assert people.exit_code == Exit.NOT_FOUND
    waits, ended = people.stderr.splitlines()
    assert waits == "no topic 'nosuch' yet: it is waited for"
    assert ended == "duemq: no topic 'nosuch'"
    programs = await run(cluster.nameserver, "consume", "nosuch", *IDLE, "--json")
    assert programs.exit_code == Exit.NOT_FOUND
    [row] = rows(programs)
    assert row["error"]["code"] == "TOPIC_NOT_FOUND"


async def test_a_topic_that_is_there_and_empty_is_nothing_worth_saying(cluster: Cluster) -> None:
    await cluster.create_topic("t")
    people = await run(cluster.nameserver, "consume", "t", *IDLE)
    assert (people.exit_code, people.stderr) == (Exit.OK, "")


async def test_a_terminal_without_the_characters_makes_no_message_fail(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    await cluster.create_topic("t")
    await cluster.send("t", ["5 €".encode()])
    process = await start(cluster.nameserver, "consume", "t", *IDLE[:-1], "60", "--count", "1")
    out, err = await process.communicate()
    assert process.returncode == Exit.OK, err
    assert out.endswith(b"5 \\u20ac\n")
