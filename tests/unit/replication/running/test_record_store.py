"""Which store a setting opens, and how long a leader renews its lease."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from duemq.errors import InvalidArgument
from duemq_server.replication.protocol.record import ReplicaId
from duemq_server.replication.running import record_store
from duemq_server.replication.running.record_store import STALLED_MS, Renewals, open_store
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.replication.stores.etcd import EtcdStore
from duemq_server.replication.stores.file import FileStore


def settings(lease_store: str, **others: float) -> ReplicaSettings:
    return ReplicaSettings(
        **others,
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


@pytest.mark.parametrize(("lease_duration", "lease_s"), [(1.0, 2), (2.4, 3), (6.0, 6), (6.5, 7)])
def test_etcd_ends_no_lease_before_its_leader_thinks_so(
    monkeypatch: pytest.MonkeyPatch, lease_duration: float, lease_s: int
) -> None:
    granted: list[int] = []

    def etcd(*_: object, lease_s: int, certificates: None) -> None:
        granted.append(lease_s)

    monkeypatch.setattr(record_store, "EtcdStore", etcd)
    open_store(settings("etcd:127.0.0.1:1", lease_duration=lease_duration))
    assert granted == [lease_s]


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


class Lease:
    """A store that counts renewals, and a clock that counts who looks at it."""

    def __init__(self) -> None:
        self.renewed = 0
        self.broken = False
        self.now_ms = 1_000_000
        self._looks = threading.Semaphore(0)

    def renew(self, leader: ReplicaId) -> None:
        if self.broken:
            raise RuntimeError("nobody has foreseen this")
        self.renewed += 1

    def steady_ms(self) -> int:
        self._looks.release()
        return self.now_ms

    async def looked_at(self, times: int) -> None:
        """So often by the thread, from now on."""
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(times):
            assert await asyncio.to_thread(self._looks.acquire, timeout=30)


async def test_an_event_loop_that_stands_still_renews_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lease = Lease()
    monkeypatch.setattr(record_store, "steady_ms", lease.steady_ms)
    told: list[tuple[int, int]] = []
    renewals = Renewals(
        lease,  # type: ignore[arg-type]
        ReplicaId("a", "0" * 32),
        1,
        lambda *when: told.append(when),
    )
    renewals.start()
    try:
        lease.now_ms += STALLED_MS  # not yet
        before = lease.renewed
        await lease.looked_at(6)
        assert lease.renewed > before

        lease.now_ms += 1
        await lease.looked_at(3)  # a renewal that was under way has ended
        before = lease.renewed
        await lease.looked_at(10)
        assert lease.renewed == before

        renewals.alive()
        await lease.looked_at(6)
        assert lease.renewed > before
    finally:
        await renewals.stop()
    assert told


async def test_a_renewal_that_fails_for_another_reason_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease = Lease()
    lease.broken = True
    monkeypatch.setattr(record_store, "steady_ms", lease.steady_ms)
    leader = ReplicaId("a", "0" * 32)
    renewals = Renewals(lease, leader, 1, lambda *when: None)  # type: ignore[arg-type]
    renewals.start()
    try:
        await lease.looked_at(3)
        lease.broken = False
        await lease.looked_at(6)
        assert lease.renewed
    finally:
        await renewals.stop()
    assert caplog.text.count("is not renewed: nobody has foreseen this") == 1
    assert "Traceback" in caplog.text
