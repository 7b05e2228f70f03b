"""The store of a group's record, for an event loop: its calls wait, so they run in threads."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from duemq.errors import InvalidArgument
from duemq.settings import Tls
from duemq.transport.tls import Certificates
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.replication.stores.etcd import EtcdStore
from duemq_server.replication.stores.file import FileStore
from duemq_server.replication.stores.store import Store, StoreError
from duemq_server.serving.clock import steady_ms

log = logging.getLogger(__name__)

STALLED_MS = 10_000
"""An event loop that stood still for so long leads nothing: its lease is not renewed any more."""


def open_store(settings: ReplicaSettings) -> Store:
    """The store that `lease_store` names.  Raises InvalidArgument."""
    kind, _, place = settings.lease_store.partition(":")
    if kind == "file":
        return FileStore(place, settings.name)
    # etcd and Kubernetes take whole seconds.  Not less: a lease that etcd ended before its leader
    # thinks so would be renewed, and counted, after another one has stood.
    lease_s = max(2, math.ceil(settings.lease_duration))
    if kind == "kubernetes":
        return _open_kubernetes(settings.name, place, lease_s)
    return EtcdStore(
        settings.etcd_endpoints,
        settings.name,
        lease_s=lease_s,
        certificates=_certificates(settings),
    )


def _certificates(settings: ReplicaSettings) -> Certificates | None:
    if not settings.etcd_over_tls:
        return None
    ca, cert, key = settings.lease_store_ca, settings.lease_store_cert, settings.lease_store_key
    return Certificates(Tls(ca=ca, cert=cert, key=key), "lease_store")


def _open_kubernetes(group: str, namespace: str, lease_s: int) -> Store:
    try:  # who does not use it does not have it, or does not load it
        from duemq_server.replication.stores.kubernetes import KubernetesStore
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            f"lease_store kubernetes needs duemq-server[kubernetes]: {error}", field="lease_store"
        ) from error
    return KubernetesStore(group, lease_s=lease_s, namespace=namespace)


class RecordStore:
    """Reads and swaps, one after the other."""

    def __init__(self, store: Store) -> None:
        self.blocking = store
        self.look_s = store.look_s
        self._thread = ThreadPoolExecutor(1, "lease-store")

    async def read(self) -> HeldRecord | None:
        """See Store.read."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.blocking.read)

    async def swap(self, version: str | None, record: Record) -> str:
        """See Store.swap."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.blocking.swap, version, record)

    async def renew(self, leader: ReplicaId) -> None:
        """See Store.renew."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.blocking.renew, leader)

    async def release(self, leader: ReplicaId) -> None:
        """See Store.release."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.blocking.release, leader)

    def close(self) -> None:
        """Ends every lease, or lets it run out."""
        self._thread.shutdown(cancel_futures=True)
        self.blocking.close()


class Renewals:
    """Renews a leader's lease in a thread of its own: a busy event loop must not look dead."""

    def __init__(
        self,
        store: Store,
        leader: ReplicaId,
        renew_ms: int,
        on_renewed: Callable[[int, int], None],
    ) -> None:
        """`on_renewed` is told in the event loop when the call that succeeded began, and ended,
        steady ms."""
        self._store = store
        self._leader = leader
        self._renew_ms = renew_ms
        self._on_renewed = on_renewed
        self._loop = asyncio.get_running_loop()
        self._alive_ms = steady_ms()
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="lease-renewal", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def alive(self) -> None:
        """The event loop runs; it says so more often than each STALLED_MS."""
        self._alive_ms = steady_ms()

    async def stop(self) -> None:
        """Renews no more; the lease runs out unless it is released."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while not self._stop.wait(self._renew_ms / 1000):
            began_ms = steady_ms()
            if began_ms - self._alive_ms > STALLED_MS:
                continue
            try:
                self._store.renew(self._leader)
            except Exception as error:  # else the thread would end, and nobody would notice
                if not self._failing:
                    unforeseen = None if isinstance(error, StoreError) else error
                    log.warning(
                        "the lease of %s is not renewed: %s",
                        self._leader,
                        error,
                        exc_info=unforeseen,
                    )
                self._failing = True
                continue
            self._failing = False
            self._loop.call_soon_threadsafe(self._on_renewed, began_ms, steady_ms())
