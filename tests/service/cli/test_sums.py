"""Commands that do many things at once: one error, one sum; groups with their lag."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq.v1 import broker_pb2
from duemq_cli.exits import Exit
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import Cluster, running_cluster

TOPIC = "orders"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path / "cluster", "b0") as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        yield cluster


async def test_quiet_prints_a_sum_and_no_lines(cluster: Cluster) -> None:
    lines = "".join(f"{number}\n" for number in range(500))
    people = await run(cluster.nameserver, "send", TOPIC, "-", "--quiet", stdin=lines)
    assert (people.exit_code, people.stdout) == (0, "")
    assert people.stderr.startswith("500 sent, 0 not in ")
    programs = await run(cluster.nameserver, "send", TOPIC, "-", "--quiet", "--json", stdin=lines)
    [row] = rows(programs)
    assert (row["summary"]["done"], row["summary"]["failed"]) == (500, 0)


async def test_lines_of_the_default_are_summed_up_too(cluster: Cluster) -> None:
    done = await run(cluster.nameserver, "send", TOPIC, "-", stdin="a\nb\n")
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr.startswith("2 sent, 0 not in ")
    one = await run(cluster.nameserver, "send", TOPIC, "a")
    assert (len(one.stdout.splitlines()), one.stderr) == (1, "")


@pytest.mark.parametrize("option", ["--key-column", "--delay-column", "--at-column"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
async def test_a_wrong_column_is_one_error_and_nothing_is_sent(
    cluster: Cluster, tmp_path: Path, option: str, suffix: str
) -> None:
    file = tmp_path / f"orders{suffix}"
    if suffix == ".csv":
        file.write_text("id,price\n" + "1,2\n" * 100)
    else:
        file.write_text('{"id": 1, "price": 2}\n' * 100)
    done = await run(cluster.nameserver, "send", TOPIC, "--file", str(file), option, "nope")
    assert done.exit_code == Exit.USAGE
    [line] = done.stderr.splitlines()
    assert "there is no column 'nope'; there are: id, price" in line
    [queue] = rows(await run(cluster.nameserver, "topic", "show", TOPIC, "--json"))
    assert queue["max_offset"] == 0


async def test_groups_are_listed_with_their_lag(cluster: Cluster) -> None:
    await cluster.send(TOPIC, [b"a", b"b", b"c"])
    commit = broker_pb2.OffsetCommit(topic=TOPIC, queue_id=0, offset=1)
    await cluster.clients["b0"].broker.CommitOffsets(
        broker_pb2.CommitOffsetsRequest(group="g", commits=[commit])
    )
    [row] = rows(await run(cluster.nameserver, "group", "list", "--json"))
    assert (row["group"], row["lag"]) == ("g", 2)
    assert row["lag_ms"] >= 0
    [row] = rows(await run(cluster.nameserver, "group", "list", "--no-lag", "--json"))
    assert row["lag"] is None
    people = await run(cluster.nameserver, "group", "list")
    assert "lag" in people.stdout


async def test_resending_can_be_quiet(cluster: Cluster) -> None:
    await cluster.send(TOPIC, [b"a", b"b"])
    failed = [
        broker_pb2.FailedMessage(topic=TOPIC, offset=offset, dead_letter=True, deliveries=2)
        for offset in (0, 1)
    ]
    await cluster.clients["b0"].broker.SendBack(
        broker_pb2.SendBackRequest(group="g", messages=failed)
    )
    done = await run(cluster.nameserver, "dlq", "resend", "g", "--all", "--quiet")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("2 sent again, 0 not in ")
    [row] = rows(await run(cluster.nameserver, "dlq", "resend", "g", "--all", "--quiet", "--json"))
    assert json.dumps(row["summary"]["done"]) == "2"
