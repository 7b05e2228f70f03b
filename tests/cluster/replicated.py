"""Groups of replicas under load: how they are, as they say themselves, and the judgement."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from duemq import Producer
from duemq.errors import DuemqError
from duemq.settings import ProducerSettings
from duemq_server.local_cluster import EmbeddedCluster
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.running.v1.stubs import ReplicationStub
from duemq_server.replication.stores.file import FileStore
from tests.cluster.harness import WAIT_S, duemq, leader_of, topic_name, until
from tests.cluster.history import History
from tests.cluster.judging import judged

GROUP, SHARD = "broker-0", "timer-0"
REFUSED_S = 2.0
LEADS = re.compile(r"leads epoch (\d+) from")


@contextmanager
def work(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[History]:
    """Under load, and judged."""
    with judged(cluster, tmp_path, random.Random(0)) as history:
        goes_on(history)
        yield history
    for group in (GROUP, SHARD):
        assert leaders_twice(cluster, group) == []


def leaders_twice(cluster: EmbeddedCluster, group: str) -> list[str]:
    """Epochs that more than one process, or one more than once, says that it has led."""
    logs = [cluster.log_file(name).read_text() for name in cluster.replicas(group)]
    led = [epoch for text in logs for epoch in LEADS.findall(text)]
    assert led
    return sorted(epoch for epoch in set(led) if led.count(epoch) > 1)


def goes_on(history: History) -> None:
    """Something that is sent from now on is acknowledged."""
    sent = history.ids("sent")
    until(lambda: bool(history.ids("acked") - sent))


def status(cluster: EmbeddedCluster, member: str) -> pb.ReplicaStatus:
    with grpc.insecure_channel(cluster.address(member)) as connection:
        return ReplicationStub(connection).GetStatus(pb.GetStatusRequest(), timeout=WAIT_S)


def shown(cluster: EmbeddedCluster, kind: str, name: str) -> dict[str, Any]:
    """What `duemq cluster show` says of a member; empty: nothing."""
    said = duemq(cluster.nameserver, "cluster", "show", "--json").stdout
    for row in map(json.loads, said.splitlines()):
        if (row["kind"], f"{row.get('group', '')}/{row['name']}".lstrip("/")) == (kind, name):
            return row
    return {}


def roles(cluster: EmbeddedCluster, group: str) -> list[str]:
    """Who leads, and then the others."""
    leader = leader_of(cluster, group)
    return [leader, *sorted(set(cluster.replicas(group)) - {leader})]


def in_sync(cluster: EmbeddedCluster, group: str) -> set[str]:
    """As its record says, by the file: whoever can be reached."""
    found = FileStore(str(cluster.data_dir("leases")), group).read()
    assert found is not None
    return {f"{group}/{each.name}" for each in found.record.in_sync}


def refusal(cluster: EmbeddedCluster) -> str:
    """Why a message is not accepted; empty: it is."""
    settings = ProducerSettings(send_timeout_s=REFUSED_S)
    with Producer(cluster.nameserver, settings=settings) as producer:
        try:
            producer.send(topic_name(), b"in vain")
        except DuemqError as error:
            return str(error)
        return ""
