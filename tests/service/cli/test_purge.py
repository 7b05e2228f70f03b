"""`duemq topic purge` and `duemq dlq purge`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq.v1 import broker_pb2
from duemq_cli.exits import Exit
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import Cluster, running_cluster

TOPIC, GROUP = "orders", "billing"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two brokers with two messages and a dead letter each."""
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        for broker, client in cluster.clients.items():
            await cluster.send(TOPIC, [b"a", b"b"], broker=broker)
            failed = broker_pb2.FailedMessage(
                topic=TOPIC, offset=0, dead_letter=True, deliveries=2, error="no"
            )
            await client.broker.SendBack(broker_pb2.SendBackRequest(group=GROUP, messages=[failed]))
        yield cluster


async def bodies(cluster: Cluster) -> list[str]:
    return [row["body"] for row in rows(await run(cluster.nameserver, "tail", TOPIC, "--json"))]


async def test_a_topic_is_empty_and_goes_on(cluster: Cluster) -> None:
    dry = await run(cluster.nameserver, "topic", "purge", TOPIC, "--dry-run", "--json")
    assert [(row["broker"], row["offset"], row["messages"]) for row in rows(dry)] == [
        ("b0", 2, 2),
        ("b1", 2, 2),
    ]
    assert await bodies(cluster) == ["a", "b", "a", "b"]
    done = await run(cluster.nameserver, "topic", "purge", TOPIC, "--yes")
    assert (done.exit_code, done.stdout) == (0, "topic orders: 4 messages purged\n")
    assert await bodies(cluster) == []
    assert await cluster.send(TOPIC, [b"c"]) == 2
    assert await bodies(cluster) == ["c"]
    one = ("--from", "earliest", "--count", "1", "--json")
    read = await run(cluster.nameserver, "consume", TOPIC, "--group", "g", *one)
    assert [row["body"] for row in rows(read)] == ["c"]
    found = await run(cluster.nameserver, "message", "find", TOPIC, "--json")
    assert [row["body"] for row in rows(found)] == ["c"]


async def test_it_stays_empty_after_a_restart_of_the_broker(cluster: Cluster) -> None:
    await run(cluster.nameserver, "topic", "purge", TOPIC, "--yes")
    await cluster.stop_broker("b0")
    await cluster.start_broker("b0")
    assert await bodies(cluster) == []
    assert await cluster.send(TOPIC, [b"c"]) == 2


async def test_dead_letters_are_gone(cluster: Cluster) -> None:
    done = await run(cluster.nameserver, "dlq", "purge", GROUP, "--json")
    assert [(row["broker"], row["messages"]) for row in rows(done)] == [("b0", 1), ("b1", 1)]
    assert rows(await run(cluster.nameserver, "dlq", "list", GROUP, "--json")) == []
    again = await run(cluster.nameserver, "dlq", "purge", GROUP)
    assert again.stdout == "the dead letters of group billing: 0 messages purged\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("topic", "purge", "nowhere"), Exit.NOT_FOUND),
        (("dlq", "purge", "nobody"), Exit.NOT_FOUND),
        (("topic", "purge", "%TIMER%", "--yes"), Exit.USAGE),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
async def test_what_is_not_there_or_not_to_be_purged(
    cluster: Cluster, arguments: tuple[str, ...], code: Exit
) -> None:
    assert (await run(cluster.nameserver, *arguments)).exit_code == code


async def test_no_group_is_seen_for_it(cluster: Cluster) -> None:
    await run(cluster.nameserver, "topic", "purge", TOPIC, "--yes")
    listed = rows(await run(cluster.nameserver, "group", "list", "--system", "--json"))
    assert [row["group"] for row in listed if "PURGED" in row["group"]] == []
