"""A store in etcd over TLS: certificates that are replaced while it is in use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from duemq.settings import Tls
from duemq.transport.tls import Certificates
from duemq_server.replication.stores import etcd as module
from duemq_server.replication.stores.etcd import EtcdStore
from duemq_server.replication.stores.etcd_v3 import rpc_pb2
from duemq_server.replication.stores.store import StoreError
from tests.certificates import authority, certificate, needs_openssl

pytestmark = needs_openssl


def nothing(*_: object) -> rpc_pb2.RangeResponse:
    return rpc_pb2.RangeResponse()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """Where one answers that asks for certificates of `ca.pem`, and holds nothing."""
    tls = certificate(authority(tmp_path), "etcd")
    ca, cert, key = (Path(each).read_bytes() for each in (tls.ca, tls.cert, tls.key))
    handler = grpc.unary_unary_rpc_method_handler(
        nothing,
        request_deserializer=rpc_pb2.RangeRequest.FromString,
        response_serializer=rpc_pb2.RangeResponse.SerializeToString,
    )
    service = rpc_pb2.DESCRIPTOR.services_by_name["KV"].full_name
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {"Range": handler})]
    )
    credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_new_certificates_are_taken_and_half_of_one_is_not(
    etcd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CALL_TIMEOUT_S", 60.0)  # a handshake on a busy machine
    mine = certificate(authority(tmp_path, "other"), "mine")
    tls = Tls(ca=str(tmp_path / "ca.pem"), cert=mine.cert, key=mine.key)
    store = EtcdStore([etcd], "g", lease_s=2, certificates=Certificates(tls))
    try:
        with pytest.raises(StoreError, match=etcd):
            store.read()
        certificate(tmp_path / "ca.pem", "mine")
        assert store.read() is None
        Path(mine.cert).write_text("half of")
        assert store.read() is None
    finally:
        store.close()
