"""`duemq dlq` against brokers in this process."""

import asyncio
import json

import pytest
from click.testing import CliRunner, Result

from duemq.v1 import broker_pb2, message_pb2
from duemq_cli.app import cli
from duemq_cli.exits import Exit
from tests.service.running_cluster import Cluster, running_cluster

GROUP, TOPIC = "billing", "orders"
LETTERS = ["a1", "a2", "b1"]


@pytest.fixture
async def cluster(tmp_path):
    """A broker with a group that has given three messages up."""
    async with running_cluster(tmp_path, "b0") as cluster:
        await cluster.create_topic(TOPIC)
        client = cluster.clients["b0"]
        records = [
            message_pb2.Record(
                body=name.encode(), message_id=f"id-{name}", key=f"key-{name[0]}", tag="t"
            )
            for name in LETTERS
        ]
        await client.send(
            broker_pb2.Batch(topic=TOPIC, records=message_pb2.RecordBatch(records=records))
        )
        for offset, name in enumerate(LETTERS):
            failed = broker_pb2.FailedMessage(
                topic=TOPIC, offset=offset, dead_letter=True, deliveries=2, error=f"no {name}"
            )
            await client.broker.SendBack(broker_pb2.SendBackRequest(group=GROUP, messages=[failed]))
        yield cluster


async def run(cluster: Cluster, *arguments: str) -> Result:
    command = ["--nameserver", cluster.nameserver, "dlq", *arguments]
    return await asyncio.to_thread(CliRunner().invoke, cli, command)


def rows(result: Result) -> list[dict]:
    return [json.loads(line) for line in result.stdout.splitlines()]


async def test_list_says_what_died_and_why(cluster: Cluster) -> None:
    listed = await run(cluster, "list", GROUP, "--json")
    assert listed.exit_code == 0
    found = rows(listed)
    assert [row["message_id"] for row in found] == ["id-a1", "id-a2", "id-b1"]
    first = found[0]
    assert (first["group"], first["topic"], first["deliveries"]) == (GROUP, TOPIC, 2)
    assert first["error"] == "no a1"
    assert first["origin"] == {"topic": TOPIC, "broker": "b0", "queue": 0, "offset": 0}
    assert first["first_failed_ms"] <= first["last_failed_ms"]
    assert "body" not in first
    people = await run(cluster, "list", GROUP, "--limit", "2")
    assert "id-a2" in people.stdout
    assert "id-b1" not in people.stdout
    assert "more than 2" in people.stderr
    by_key = rows(await run(cluster, "list", GROUP, "--key", "key-b", "--json"))
    assert [row["message_id"] for row in by_key] == ["id-b1"]
    assert not (await run(cluster, "list", GROUP, "--until", "-1h", "--json")).stdout


async def test_show_shows_them_whole(cluster: Cluster) -> None:
    shown = await run(cluster, "show", GROUP, "--id", "id-b1")
    assert shown.exit_code == 0
    for part in ("id-b1", "key-b", "orders  b0/0 @ 2", "no b1", "delivered 2 times"):
        assert part in shown.stdout
    (row,) = rows(await run(cluster, "show", GROUP, "--id", "id-b1", "--json"))
    assert (row["body"], row["properties"]) == ("b1", {})
    nothing = await run(cluster, "show", GROUP, "--id", "id-c1")
    assert nothing.exit_code == Exit.NOT_FOUND


async def test_resend_prints_what_it_sent(cluster: Cluster) -> None:
    would = await run(cluster, "resend", GROUP, "--key", "key-a", "--dry-run", "--json")
    assert [(row["dead_letter_id"], row["topic"]) for row in rows(would)] == [
        ("id-a1", TOPIC),
        ("id-a2", TOPIC),
    ]
    done = await run(cluster, "resend", GROUP, "--key", "key-a", "--json")
    assert done.exit_code == 0
    for row in rows(done):
        [records] = (
            await cluster.clients["b0"].pull(row["topic"], row["queue"], row["offset"])
        ).queues
        copy = records.records.records[0]
        assert copy.message_id == row["message_id"]
        assert copy.properties["duemq-dead-letter-id"] == row["dead_letter_id"]
    people = await run(cluster, "resend", GROUP, "--all", "--limit", "2")
    assert people.exit_code == 0
    assert "id-a1  → orders b0/" in people.stdout
    assert "2 sent again, 0 not" in people.stderr
    for choice, ends in (("--id=id-c1", Exit.NOT_FOUND), ("--key=none", Exit.OK)):
        nothing = await run(cluster, "resend", GROUP, choice)
        assert (nothing.exit_code, nothing.stderr) == (ends, "no such dead letter\n")


async def test_what_cannot_be_sent_makes_it_fail(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duemq.administering.letters.dead_letters.ROUTE_TIMEOUT_S", 0.2)
    done = await run(cluster, "resend", GROUP, "--all", "--to", "nowhere", "--json")
    assert done.exit_code == Exit.FAILED
    assert [row["error"]["code"] for row in rows(done)] == ["TOPIC_NOT_FOUND"] * 3
    people = await run(cluster, "resend", GROUP, "--id", "id-a1", "--to", "nowhere")
    assert people.exit_code == Exit.FAILED
    assert "id-a1 not sent" in people.stderr


@pytest.mark.parametrize("arguments", [(), ("--all", "--key", "k"), ("--all", "--limit", "0")])
async def test_a_selection_is_needed(cluster: Cluster, arguments: tuple[str, ...]) -> None:
    refused = await run(cluster, "resend", GROUP, *arguments)
    assert refused.exit_code == Exit.USAGE


async def test_an_unknown_group_has_its_own_exit_code(cluster: Cluster) -> None:
    for command in (("list",), ("show",), ("resend", "--all")):
        name, *options = command
        refused = await run(cluster, name, "nobody", *options, "--json")
        assert refused.exit_code == Exit.NOT_FOUND
        (row,) = rows(refused)
        assert row["error"]["code"] == "GROUP_NOT_FOUND"
    wrong = await run(cluster, "list", GROUP, "--since", "yesterday")
    assert wrong.exit_code == Exit.USAGE


async def test_what_was_sent_again_is_marked_and_no_longer_listed(cluster: Cluster) -> None:
    await run(cluster, "resend", GROUP, "--id", "id-a2")
    listed = rows(await run(cluster, "list", GROUP, "--json"))
    assert [row["message_id"] for row in listed] == ["id-a1", "id-b1"]
    everything = rows(await run(cluster, "list", GROUP, "--all", "--json"))
    assert [(row["message_id"], row["resent"]) for row in everything] == [
        ("id-a1", False),
        ("id-a2", True),
        ("id-b1", False),
    ]
    assert "sent again" in (await run(cluster, "show", GROUP, "--id", "id-a2")).stdout
    again = rows(await run(cluster, "resend", GROUP, "--all", "--new", "--json"))
    assert [row["dead_letter_id"] for row in again] == ["id-a1", "id-b1"]
    assert rows(await run(cluster, "list", GROUP, "--json")) == []
    assert rows(await run(cluster, "resend", GROUP, "--all", "--new", "--json")) == []
    # The marks hold.
    await cluster.stop_broker("b0")
    await cluster.start_broker("b0")
    assert rows(await run(cluster, "list", GROUP, "--json")) == []
    assert len(rows(await run(cluster, "list", GROUP, "--all", "--json"))) == 3
