"""Schedules through command line and SDK, with kill -9 of the timer shard in between."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import pytest

from duemq import Admin, Producer
from duemq.descriptions import CatchUp
from duemq.errors import InvalidArgument, ScheduleNotFound, TopicNotFound
from duemq_cli.exits import Exit
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import duemq, rows, topic_name, until


def made(cluster: EmbeddedCluster) -> str:
    topic = topic_name()
    with Producer(cluster.nameserver) as producer:
        producer.send(topic, b"made")
    return topic


def came(cluster: EmbeddedCluster, topic: str, name: str) -> list[int]:
    """When the schedule's messages in the topic were to be, in order."""
    return sorted(
        int(message.properties["duemq.scheduled_ms"])
        for message in read_topic(cluster.nameserver, topic)
        if message.properties.get("duemq.schedule") == name
    )


def all_came(cluster: EmbeddedCluster, topic: str, names: Iterable[str], count: int) -> None:
    until(lambda: all(len(came(cluster, topic, name)) >= count for name in names))


@pytest.mark.long
def test_each_occurrence_comes_once_over_kill9(cluster: EmbeddedCluster) -> None:
    topic = made(cluster)
    start_ms = time.time_ns() // 1_000_000 // 1_000 * 1_000 + 1_000
    kinds = {
        f"{topic}-every": {"every": "1s", "start": start_ms},
        f"{topic}-cron": {"cron": "* * * * * *", "zone": "Asia/Tokyo"},
    }
    with Admin(cluster.nameserver) as admin:
        for name, when in kinds.items():
            outcome, _ = admin.put_schedule(
                name, topic=topic, body=b"tick", catch_up=CatchUp.ALL, **when
            )
            assert outcome == "created"
        for round_ in range(1, 4):
            all_came(cluster, topic, kinds, 2 * round_)
            cluster.kill("timer-0")
            cluster.wait_ready()
        all_came(cluster, topic, kinds, 9)
        for name in kinds:
            paused = admin.pause_schedule(name)
            assert paused.paused
            assert paused.next_due_ms is None
        for name in kinds:
            all_came(cluster, topic, [name], admin.schedule(name).stored)
            found = came(cluster, topic, name)
            assert found == list(range(found[0], found[-1] + 1, 1_000))
            assert admin.delete_schedule(name)
            assert not admin.delete_schedule(name)
    for message in read_topic(cluster.nameserver, topic):
        if "duemq.scheduled_ms" in message.properties:
            assert message.due_ms == int(message.properties["duemq.scheduled_ms"])
            assert message.store_ms >= message.due_ms


def test_what_is_wrong_is_said(cluster: EmbeddedCluster) -> None:
    topic = made(cluster)
    with Admin(cluster.nameserver) as admin:
        with pytest.raises(InvalidArgument, match="its hour must be of 0-23"):
            admin.put_schedule("s", topic=topic, cron="0 24 * * *")
        with pytest.raises(InvalidArgument, match="zone"):
            admin.put_schedule("s", topic=topic, cron="0 1 * * *", zone="Mars/Olympus")
        with pytest.raises(InvalidArgument, match="every_ms"):
            admin.put_schedule("s", topic=topic, every="500ms")
        with pytest.raises(InvalidArgument, match="name"):
            admin.put_schedule("%s", topic=topic, every="1s")
        with pytest.raises(TopicNotFound):
            admin.put_schedule("s", topic=f"{topic}-none", every="1s")
        with pytest.raises(ScheduleNotFound, match="there is no schedule 's'"):
            admin.next_occurrences("s")


def test_the_command_line(cluster: EmbeddedCluster) -> None:
    nameserver, topic = cluster.nameserver, made(cluster)
    add = ("schedule", "add", topic, "--topic", topic, "--body", "go", "--json")
    noon = ("--cron", "0 12 * * *", "--zone", "Europe/Berlin")
    (first,) = rows(duemq(nameserver, *add, *noon, "--key", "k", "--property", "a=b"))
    assert (first["outcome"], first["key"], first["properties"]) == ("created", "k", {"a": "b"})
    (again,) = rows(duemq(nameserver, *add, *noon, "--key", "k", "--property", "a=b"))
    assert again["outcome"] == "unchanged"
    refused = duemq(nameserver, *add, "--every", "2h", "--if-absent")
    assert refused.returncode == Exit.FAILED
    (changed,) = rows(duemq(nameserver, *add, "--every", "2h", "--jitter", "1m"))
    assert (changed["outcome"], changed["every_ms"]) == ("changed", 7_200_000)
    listed = rows(duemq(nameserver, "schedule", "list", "--json"))
    assert topic in [row["name"] for row in listed]
    found = rows(duemq(nameserver, "schedule", "next", topic, "--count", "3", "--json"))
    distances = [two["at_ms"] - one["at_ms"] for one, two in itertools.pairwise(found)]
    assert distances == [7_200_000, 7_200_000]
    assert all(0 <= each["due_ms"] - each["at_ms"] <= 60_000 for each in found)
    (paused,) = rows(duemq(nameserver, "schedule", "pause", topic, "--json"))
    assert paused["paused"]
    (resumed,) = rows(duemq(nameserver, "schedule", "resume", topic, "--json"))
    assert not resumed["paused"]
    assert resumed["next_due_ms"] == found[0]["due_ms"]
    (deleted,) = rows(duemq(nameserver, "schedule", "delete", topic, "--json"))
    assert deleted["deleted"]
    gone = duemq(nameserver, "schedule", "pause", topic)
    assert gone.returncode == Exit.NOT_FOUND
    assert "there is no schedule" in gone.stderr
