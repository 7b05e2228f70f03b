"""Which settings make a replica."""

from __future__ import annotations

from typing import Any

import pytest

from duemq.errors import InvalidArgument
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import Answer, Hello, Welcome
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId
from duemq_server.replication.settings import ReplicaSettings


def settings(lease_store: str, **given: Any) -> ReplicaSettings:
    fields: dict[str, Any] = {"name": "broker-0", "data_dir": "d", "replica": "0"}
    fields |= {"listen": "127.0.0.1:9870", "replicas": ("0", "1")}
    return ReplicaSettings(lease_store=lease_store, **(fields | given))


@pytest.mark.parametrize("lag_max", [0.1, 0.5, 3.0, 60.0])
def test_who_answers_each_heartbeat_does_not_lag(lag_max: float) -> None:
    """However short it is, and although one comes late."""
    times = settings("kubernetes", lag_max=lag_max).times()
    a, b = (ReplicaId(name, name * 32) for name in "ab")
    record = Record("g", 7, frozenset("ab"), frozenset({a, b}), 4, a)
    found, epochs = HeldRecord("v1", record), Epochs([])
    leader = Leader(a, found, epochs, start=0, committed=0, min_insync=1, now_ms=0, times=times)
    assert isinstance(leader.hello(1, Hello("g", 7, b, 4, (), 0, 0, 1), 0, 0), Welcome)
    for number in range(10):
        sent_ms = number * times.heartbeat_ms
        leader.answered(1, Answer(4, b, 0, sent_ms), 0, sent_ms)
        assert leader.change(sent_ms + 2 * times.heartbeat_ms) is None


@pytest.mark.parametrize(
    "lease_store",
    [
        "file:/tmp/x",
        "etcd:a:2379",
        "etcd:a:2379,b:2379",
        "etcd:https://a:2379,https://b:2379",
        "kubernetes",
        "kubernetes:messages",
    ],
)
def test_stores_of_a_group(lease_store: str) -> None:
    assert settings(lease_store).replicated


@pytest.mark.parametrize(
    "lease_store",
    [
        "none",
        "",
        "file:",
        "etcd",
        "etcd:a",
        "etcd:https://a:2379,b:2379",
        "etcd:http://a:2379",
        "kubernetes:",
        "kubernetes:A_B",
        "zookeeper:a:1",
    ],
)
def test_other_stores_are_refused(lease_store: str) -> None:
    with pytest.raises(InvalidArgument, match="lease_store"):
        settings(lease_store)


@pytest.mark.parametrize("name", ["Broker", "broker_0", "-b", "b..c", "b."])
def test_a_group_whose_name_no_lease_can_have_is_refused(name: str) -> None:
    assert settings("file:/tmp/x", name=name).replicated
    with pytest.raises(InvalidArgument, match="name"):
        settings("kubernetes", name=name)


def test_who_has_no_replicas_has_no_store() -> None:
    with pytest.raises(InvalidArgument, match="replica must be given"):
        settings("kubernetes", replica="", replicas=())


def test_who_has_no_replicas_keeps_nothing_on_two_disks() -> None:
    assert settings("none", replica="", replicas=(), min_insync=1).min_insync == 1
    with pytest.raises(InvalidArgument, match=r"min_insync: 2 .*without replicas"):
        settings("none", replica="", replicas=(), min_insync=2)


def test_certificates_are_for_etcd_over_tls_and_come_in_pairs() -> None:
    over_tls = "etcd:https://a:2379,https://b:2379"
    made = settings(over_tls, lease_store_ca="ca", lease_store_cert="c", lease_store_key="k")
    assert made.etcd_over_tls
    assert made.etcd_endpoints == ["a:2379", "b:2379"]
    assert not settings("etcd:a:2379").etcd_over_tls
    for store in ("etcd:a:2379", "file:/tmp/x", "kubernetes"):
        with pytest.raises(InvalidArgument, match=r"lease_store.*https"):
            settings(store, lease_store_ca="ca")
    with pytest.raises(InvalidArgument, match="lease_store_key"):
        settings(over_tls, lease_store_cert="c")
    with pytest.raises(InvalidArgument, match="lease_store_cert"):
        settings(over_tls, lease_store_key="k")
