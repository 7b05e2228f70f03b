"""Which store a setting opens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from duemq.errors import InvalidArgument
from duemq_server.replication.running.record_store import open_store
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.replication.stores.etcd import EtcdStore
from duemq_server.replication.stores.file import FileStore


def settings(lease_store: str) -> ReplicaSettings:
    return ReplicaSettings(
        name="g",
        data_dir="d",
        replica="0",
        replicas=("0",),
        listen="127.0.0.1:1",
        lease_store=lease_store,
    )


def test_each_setting_opens_its_store(tmp_path: Path) -> None:
    kubernetes = pytest.importorskip("duemq_server.replication.stores.kubernetes")
    kinds = {
        f"file:{tmp_path}": FileStore,
        "etcd:127.0.0.1:1": EtcdStore,
        "kubernetes:messages": kubernetes.KubernetesStore,
    }
    for lease_store, kind in kinds.items():
        store = open_store(settings(lease_store))
        assert type(store) is kind
        assert store.look_s > 0
        store.close()


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in [
        name for name in sys.modules if name.endswith(("stores.kubernetes", ".lease_api"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lightkube", None)
    with pytest.raises(InvalidArgument, match=r"duemq-server\[kubernetes\]"):
        open_store(settings("kubernetes"))
