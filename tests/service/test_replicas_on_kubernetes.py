"""Replicas whose record lies in a Lease; the API server is one of our own."""

import json

import pytest

from duemq_server.replication.stores.kubernetes import KubernetesStore
from duemq_server.replication.stores.store import StoreError
from tests.service.replica_group import Group, patient_hand_overs
from tests.service.running_cluster import until
from tests.unit.replication.stores.fake_api_server import FakeApiServer, Refusal


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = FakeApiServer()
    config = {
        "current-context": "c",
        "contexts": [
            {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "messages"}}
        ],
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": server.token}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield server
    server.stop()


@pytest.fixture
async def lines(server, tmp_path, monkeypatch):
    patient_hand_overs(monkeypatch)
    group = Group(tmp_path, 2, lease_store="kubernetes")
    group.start()
    yield group
    await group.stop()


def holder(server):
    return server.leases["messages", "lines"]["spec"].get("holderIdentity") or ""


def reason(member):
    campaign = getattr(member.replica, "campaign", None)  # not yet, when all has begun anew
    return campaign.reason if campaign is not None else ""


async def test_a_clean_stop_hands_over_and_the_lease_says_to_whom(lines, server):
    leader = await lines.in_sync(2)
    assert isinstance(leader.replica.store.blocking, KubernetesStore)
    assert holder(server) == str(leader.replica.me)
    await leader.term.write(b"before")
    term = leader.term
    await leader.stop()
    assert term.handed_over
    leader.start()
    successor = await lines.in_sync(2)
    assert successor is not leader
    assert holder(server) == str(successor.replica.me)
    await lines.write(b"after")
    await until(lambda: leader.lines == [b"before", b"after"])


async def test_while_the_api_server_is_away_a_group_that_is_whole_goes_on(lines, server):
    leader = await lines.in_sync(2)
    server.before = lambda method: Refusal(503, "ServiceUnavailable").answer
    with pytest.raises(StoreError):
        await leader.replica.store.read()
    refused = server.calls.total()
    await until(lambda: server.calls.total() >= refused + 5)
    for number in range(10):
        await lines.write(b"%d" % number)
    (other,) = [each for each in lines.members.values() if each is not leader]
    await until(lambda: len(other.lines) == 10)
    assert (await lines.leader()) is leader
    server.before = lambda method: None
    before = server.revision
    await until(lambda: server.revision > before)  # renewed


async def test_without_the_lease_nobody_leads_until_an_operator_says_who(lines, server):
    leader = await lines.in_sync(2)
    await leader.term.write(b"before")
    server.leases.clear()
    refusing = "see which replica has the most"
    await until(lambda: all(refusing in reason(each) for each in lines.members.values()))
    assert server.leases == {}
    await leader.replica.operators.adopt(confirmed=True)
    assert (await lines.in_sync(2)) is leader
    await lines.write(b"after")
