"""A store in etcd, against answers that are made here; with a real one: tests/cluster."""

from __future__ import annotations

import pytest

from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId, encode
from duemq_server.replication.stores import etcd as module
from duemq_server.replication.stores.etcd import EtcdStore
from duemq_server.replication.stores.etcd_v3 import rpc_pb2
from duemq_server.replication.stores.store import StoreError

ME = ReplicaId("a", "1" * 32)
RECORD = Record("g", 7, frozenset({"a"}), frozenset({ME}))
LED = Record("g", 7, frozenset({"a"}), frozenset({ME}), 1, ME)


@pytest.mark.parametrize(("gone", "left"), [("record", "version"), ("version", "record")])
def test_half_of_a_record_is_neither_one_nor_none(
    monkeypatch: pytest.MonkeyPatch, gone: str, left: str
) -> None:
    """None would be put where none is, for ever: there the other key still is."""
    keys = {b"duemq/g/record": encode(RECORD), b"duemq/g/version": b"v"}
    del keys[f"duemq/g/{gone}".encode()]

    def get(_: object, request: rpc_pb2.RangeRequest) -> list[rpc_pb2.KeyValue]:
        end = request.range_end or request.key + b"\0"
        there = [key for key in sorted(keys) if request.key <= key < end]
        return [rpc_pb2.KeyValue(key=key, value=keys[key]) for key in there]

    def transact(_: object, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        answer = rpc_pb2.TxnResponse(succeeded=False)
        for each in request.failure:
            answer.responses.add().response_range.kvs.extend(get(_, each.request_range))
        return answer

    monkeypatch.setattr(module._Endpoint, "get", get)
    monkeypatch.setattr(module._Endpoint, "transact", transact)
    store = EtcdStore(["127.0.0.1:1"], "g", lease_s=2)
    try:
        told = f"duemq/g/record: somebody removed `{gone}` alone: remove `{left}`, too"
        with pytest.raises(StoreError, match=told):
            store.read()
        with pytest.raises(StoreError, match=told):
            store.swap(None, RECORD)
    finally:
        store.close()


def test_reads_are_no_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which one before 3.5.5 dies if it answers too late (etcd-io/etcd#14110)."""
    lease = f"duemq/g/lease/{ME.disk}".encode()
    keys = {lease: b"2 1", b"duemq/g/record": encode(LED), b"duemq/g/version": b"v"}
    asked: list[tuple[bytes, bytes]] = []

    def get(_: object, request: rpc_pb2.RangeRequest) -> list[rpc_pb2.KeyValue]:
        asked.append((request.key, request.range_end))
        end = request.range_end or request.key + b"\0"
        return [
            rpc_pb2.KeyValue(key=key, value=value)
            for key, value in keys.items()
            if request.key <= key < end
        ]

    monkeypatch.setattr(module._Endpoint, "get", get)
    monkeypatch.setattr(module._Endpoint, "transact", lambda *_: pytest.fail("a transaction"))
    store = EtcdStore(["127.0.0.1:1"], "g", lease_s=2)
    try:
        assert store.read() == HeldRecord("v", LED, "2 1")
    finally:
        store.close()
    assert asked == [(b"duemq/g/record", b"duemq/g/version\0"), (lease, b"")]
