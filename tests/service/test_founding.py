"""A group is not founded empty under the name of a broker that has data without replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from duemq_server.nameserver.reports import BrokerReport
from duemq_server.replication.running.following import founding
from tests.service.replica_group import Group
from tests.service.running_cluster import WAIT_S, Cluster, running_cluster, until

NAME = "lines"


def group_of(cluster: Cluster, directory: Path) -> Group:
    return Group(directory / "replicas", 3, nameservers=(cluster.nameserver,))


@pytest.mark.parametrize("stopped", [True, False])
async def test_empty_replicas_wait_for_the_former_data_or_an_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(founding, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(founding, "ASK_TIMEOUT_S", WAIT_S)  # who asks in vain founds
    async with running_cluster(tmp_path, NAME) as cluster:
        if stopped:
            await cluster.stop_broker(NAME)
        replicas = group_of(cluster, tmp_path)
        replicas.start()
        members = replicas.members.values()
        try:
            await until(lambda: all("is not founded" in each.reason for each in members))
            assert all(f"duemq cluster forget {NAME}" in each.reason for each in members)
            assert all(each.replica and each.replica.record is None for each in members)
            if not stopped:
                await cluster.stop_broker(NAME)
            cluster.registry.forget(BrokerReport, NAME, 0)
            await replicas.leader()
        finally:
            await replicas.stop()


async def test_others_and_nameservers_that_are_away_keep_nobody_from_it(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, "b0") as cluster:
        replicas = Group(tmp_path / "r", 3, nameservers=("127.0.0.1:1", cluster.nameserver))
        replicas.start()
        try:
            await replicas.leader()
        finally:
            await replicas.stop()
