"""A store in etcd, against answers that are made here; with a real one: tests/cluster."""

from __future__ import annotations

import pytest

from duemq_server.replication.protocol.record import Record, ReplicaId, encode
from duemq_server.replication.stores import etcd as module
from duemq_server.replication.stores.etcd import EtcdStore
from duemq_server.replication.stores.etcd_v3 import rpc_pb2
from duemq_server.replication.stores.store import StoreError

ME = ReplicaId("a", "1" * 32)
RECORD = Record("g", 7, frozenset({"a"}), frozenset({ME}))


@pytest.mark.parametrize(("gone", "left"), [("record", "version"), ("version", "record")])
def test_half_of_a_record_is_neither_one_nor_none(
    monkeypatch: pytest.MonkeyPatch, gone: str, left: str
) -> None:
    """None would be put where none is, for ever: there the other key still is."""
    keys = {b"duemq/g/record": encode(RECORD), b"duemq/g/version": b"v"}
    del keys[f"duemq/g/{gone}".encode()]

    def transact(_: object, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        answer = rpc_pb2.TxnResponse(succeeded=False)
        for each in request.success if not request.compare else request.failure:
            found = answer.responses.add().response_range
            if value := keys.get(each.request_range.key):
                found.kvs.add(value=value)
        return answer

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
