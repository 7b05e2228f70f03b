"""Which settings make a replica."""

from __future__ import annotations

from typing import Any

import pytest

from duemq.errors import InvalidArgument
from duemq_server.replication.settings import ReplicaSettings


def settings(lease_store: str, **given: Any) -> ReplicaSettings:
    fields: dict[str, Any] = {"name": "broker-0", "data_dir": "d", "replica": "0"}
    fields |= {"listen": "127.0.0.1:9870", "replicas": ("0", "1")}
    return ReplicaSettings(lease_store=lease_store, **(fields | given))


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
