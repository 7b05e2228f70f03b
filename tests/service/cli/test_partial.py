"""One of two brokers is away: every command that may not have the whole answer says so."""

import asyncio

import pytest
from click.testing import Result

from duemq import errors
from duemq.aio import Admin, PullConsumer
from duemq.v1 import broker_pb2
from duemq_cli.exits import Exit
from duemq_server.bench.harness.topic_reader import read_topic
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import Cluster, running_cluster, soon_given_up

TOPIC, GROUP = "orders", "billing"
# For those that are there.
PATIENT_S = "60"


@pytest.fixture(params=["stopped", "silent"])
async def cluster(tmp_path, request, monkeypatch):
    """b1 has said goodbye, or is still listed and does not answer."""
    soon_given_up(monkeypatch, "b1")
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        await cluster.create_topic(TOPIC)
        for broker in ("b0", "b1"):
            await cluster.send(TOPIC, [b"a", b"b"], broker=broker)
            client = cluster.clients[broker]
            failed = broker_pb2.FailedMessage(
                topic=TOPIC, offset=0, dead_letter=True, deliveries=2, error="no"
            )
            await client.broker.SendBack(broker_pb2.SendBackRequest(group=GROUP, messages=[failed]))
            commit = broker_pb2.OffsetCommit(topic=TOPIC, queue_id=0, offset=1)
            await client.broker.CommitOffsets(
                broker_pb2.CommitOffsetsRequest(group=GROUP, commits=[commit])
            )
        if request.param == "stopped":
            await cluster.stop_broker("b1")
        else:
            await cluster.silence_broker("b1")
        yield cluster


COMMANDS = [
    (("topic", "list"), "orders"),
    (("topic", "show", TOPIC), "b0"),
    (("group", "list"), GROUP),
    (("group", "show", GROUP), GROUP),
    (("group", "reset", GROUP, "--topic", TOPIC, "--to", "earliest", "--dry-run"), "b0"),
    (("group", "skip", GROUP, "--dry-run"), "b0"),
    (("group", "clone", GROUP, "other", "--dry-run"), "b0"),
    (("message", "find", TOPIC), "b0/0 @ 0"),
    (("message", "show", TOPIC, "no-such-id"), None),
    (("dlq", "list", GROUP), "no"),
    (("dlq", "show", GROUP), "b0/"),
    (("dlq", "show", GROUP, "--limit", "1"), "b0/"),
    (("dlq", "resend", GROUP, "--all", "--dry-run"), TOPIC),
    (("dlq", "resend", GROUP, "--all", "--limit", "1"), TOPIC),
    (("tail", TOPIC), "b0/0 @ 0"),
    (("topic", "purge", TOPIC, "--dry-run"), "2 messages would go"),
    (("dlq", "purge", GROUP, "--dry-run"), "1 messages would go"),
    (("timer", "owners"), "b0"),
]


async def test_a_topic_without_a_limit_of_its_own_shows_none(cluster: Cluster) -> None:
    listed = await run(cluster.nameserver, "--timeout", PATIENT_S, "topic", "list")
    [row] = [line for line in listed.stdout.splitlines() if line.startswith(TOPIC)]
    assert row.split()[2] == "-"


@pytest.mark.parametrize(
    ("command", "known"),
    COMMANDS,
    ids=lambda each: " ".join(each[:2]) if isinstance(each, tuple) else "",
)
async def test_what_is_known_is_printed_and_what_is_not_is_said(
    cluster: Cluster, command: tuple[str, ...], known: str | None
) -> None:
    command = ("--timeout", PATIENT_S, *command)
    people = await run(cluster.nameserver, *command)
    assert people.exit_code == Exit.PARTIAL, people.stdout + people.stderr
    assert "duemq: incomplete, no answer of b1: " in people.stderr
    if known is not None:
        assert known in people.stdout
    programs = await run(cluster.nameserver, *command, "--json")
    assert programs.exit_code == Exit.PARTIAL, programs.stdout + programs.stderr
    *_, last = rows(programs)
    assert [each["broker"] for each in last["missing_brokers"]] == ["b1"]


async def test_settings_of_a_group_are_not_taken_from_a_part_of_the_brokers(
    cluster: Cluster,
) -> None:
    async def asked(*command: str) -> Result:
        return await run(cluster.nameserver, "--timeout", PATIENT_S, "group", *command)

    for command in (("create", "new"), ("update", GROUP, "--retries-max", "3")):
        refused = await asked(*command)
        assert refused.exit_code == Exit.UNAVAILABLE
        assert "nothing was changed" in refused.stderr
    listed = rows(await asked("list", "--json"))
    assert "new" not in [row.get("group") for row in listed]
    shown, *_ = rows(await asked("show", GROUP, "--json"))
    assert shown["retries_max"] != 3


async def test_a_consumer_that_ends_says_whose_messages_it_did_not_see(tmp_path) -> None:
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        await cluster.create_topic(TOPIC)
        await cluster.send(TOPIC, [b"a"])
        await cluster.stop_broker("b1")
        idle = ("--group", "whole", "--from", "earliest", "--idle-timeout", "5")
        people = await run(cluster.nameserver, "consume", TOPIC, *idle)
        assert "b0/0 @ 0" in people.stdout
        assert "incomplete, no answer of b1" in people.stderr
        assert people.exit_code == Exit.PARTIAL


async def test_an_audit_does_not_take_a_part_for_the_whole(tmp_path) -> None:
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        await cluster.create_topic(TOPIC)
        await cluster.send(TOPIC, [b"a"])

        def read() -> int:
            return len(list(read_topic(cluster.nameserver, TOPIC)))

        assert await asyncio.to_thread(read) == 1
        await cluster.stop_broker("b1")
        with pytest.raises(errors.PartialAnswer, match="b1"):
            await asyncio.to_thread(read)


async def test_the_cluster_shows_who_is_lost(cluster: Cluster) -> None:
    people = await run(cluster.nameserver, "cluster", "show")
    assert people.exit_code == Exit.FAILED
    found = rows(await run(cluster.nameserver, "cluster", "show", "--json"))
    (lost,) = [row for row in found if row["name"] == "b1"]
    assert lost["error"]
    if lost["lost_ms"] is not None:  # else it is listed and does not answer
        assert "b1" in people.stdout
        assert "lost since 20" in people.stdout


async def test_what_changes_something_changes_nothing(cluster: Cluster) -> None:
    reset = ("--timeout", PATIENT_S, "group", "reset", GROUP, "--topic", TOPIC, "--to", "earliest")
    refused = await run(cluster.nameserver, *reset)
    assert refused.exit_code == Exit.UNAVAILABLE
    assert "b1" in refused.stderr
    assert "nothing was changed" in refused.stderr
    # What does not need the one that is away is done.
    done = await run(cluster.nameserver, *reset, "--queue", "b0/0", "--json")
    assert done.exit_code == 0, done.stdout
    [row] = rows(done)
    assert (row["broker"], row["before"], row["after"]) == ("b0", 1, 0)


async def test_a_topic_that_is_not_made_everywhere_is_said_to_be_made_where_it_is(
    tmp_path, monkeypatch
) -> None:
    soon_given_up(monkeypatch, "b1")
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        await cluster.silence_broker("b1")
        async with Admin(cluster.nameserver) as admin:
            with pytest.raises(
                errors.Unavailable, match=r"no answer of b1: .* created at b0: create it"
            ):
                await admin.create_topic(TOPIC)
        assert TOPIC in cluster.brokers["b0"].store.topics


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["people", "programs"])
async def test_a_topic_is_deleted_where_a_broker_answers(cluster: Cluster, form) -> None:
    delete = ("--timeout", PATIENT_S, "topic", "delete", TOPIC, "--yes", *form)
    done = await run(cluster.nameserver, *delete)
    assert done.exit_code == Exit.PARTIAL, done.stdout + done.stderr
    if form:
        first, last = rows(done)
        assert first == {"topic": TOPIC, "deleted": True, "pending": None}
        assert [each["broker"] for each in last["missing_brokers"]] == ["b1"]
    else:
        assert f"topic {TOPIC} deleted" in done.stdout
        assert "incomplete, no answer of b1" in done.stderr
    assert TOPIC not in cluster.brokers["b0"].store.topics


async def test_a_timer_shard_is_released_at_all_brokers_or_at_none(cluster: Cluster) -> None:
    release = ("--timeout", PATIENT_S, "timer", "release", "0", "--accept-loss")
    refused = await run(cluster.nameserver, *release)
    assert refused.exit_code == Exit.UNAVAILABLE
    assert "b1" in refused.stderr
    assert "nothing was released" in refused.stderr


async def test_a_reader_of_a_whole_topic_can_know(cluster: Cluster) -> None:
    async with Admin(cluster.nameserver) as admin:
        with pytest.raises(errors.PartialAnswer) as caught:
            await admin.topics()
        assert [each.name for each in caught.value.missing] == ["b1"]
        assert isinstance(caught.value.partial, list)
        assert [each.name for each in caught.value.partial] == [TOPIC]
        letters = admin.dead_letters(GROUP)
        assert (await anext(letters)).broker == "b0"
        with pytest.raises(errors.PartialAnswer):
            await anext(letters)


async def test_a_pull_consumer_knows_and_logs_who_is_away(
    tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        await cluster.create_topic(TOPIC)
        async with PullConsumer(nameserver=cluster.nameserver) as consumer:
            assert consumer.missing == ()
        await cluster.stop_broker("b1")
        async with PullConsumer(nameserver=cluster.nameserver) as consumer:
            assert [each.name for each in consumer.missing] == ["b1"]
            await consumer.assign(TOPIC)
    assert "topic orders may have queues on b1" in caplog.text
