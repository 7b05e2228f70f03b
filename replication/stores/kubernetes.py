"""A store in Kubernetes: one Lease (coordination.k8s.io/v1) a group, of the group's name.

metadata.annotations
  duemq/record    the record
  duemq/version   random, written with each record: what a compare-and-set compares
  duemq/lease     a number that each renewal changes; not there: the leader has no lease
spec              for who looks with kubectl, nothing here reads it
  holderIdentity  the leader, NAME/DISK ID, while it has a lease
  leaseDurationSeconds, acquireTime, renewTime, leaseTransitions

Each write replaces the Lease that was read, by its uid and resourceVersion: one that is late, after
another write or a deletion, fails.  A renewal is one write, of what was seen last.  The server ends
no lease: candidates wait for the number to stand still (replication/protocol/election.py).
"""

from __future__ import annotations

import copy
import secrets
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

import tenacity
from lightkube import KubeConfig
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease

from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId, decode, encode
from duemq_server.replication.stores.lease_api import LeaseApi, MovedError
from duemq_server.replication.stores.store import Conflict, StoreError
from duemq_server.storage.errors import UnknownVersion

ATTEMPTS = 6
"""Of one write: the leader's renewals and changes of the record may meet."""
RECORD, VERSION, LEASE = "duemq/record", "duemq/version", "duemq/lease"
LABELS = {"app.kubernetes.io/name": "duemq", "app.kubernetes.io/managed-by": "duemq"}


T = TypeVar("T")


class KubernetesStore:
    """Implements duemq_server.replication.stores.store.Store; any thread."""

    look_s = 0.5

    def __init__(
        self,
        group: str,
        *,
        lease_s: int,
        namespace: str = "",
        config: Callable[[], KubeConfig] = KubeConfig.from_env,
    ) -> None:
        """`config`: by default the pod's service account, else KUBECONFIG; `namespace`: its own."""
        if not group:
            raise ValueError("a Lease needs a name")
        self._group = group
        self._api = LeaseApi(group, namespace, config)
        self._lease_s = lease_s
        self._renewals = 0
        self._seen: Lease | None = None  # what renewals replace
        self._read: tuple[str, str | None] | None = None  # version and lease at the last read
        self._renewed: set[str] = set()  # disk ids whose lease begins with their takeover
        self._held: set[str] = set()  # disk ids that had a lease by this object
        self._guard = threading.Lock()  # guards all of these

    def close(self) -> None:
        """Closes the connections.  A lease runs out by itself."""
        self._api.close()

    # -- the record

    def read(self) -> HeldRecord | None:
        """See Store."""
        found = self._found(self._get())
        with self._guard:
            self._read = (found.version, found.lease) if found is not None else None
        return found

    def swap(self, version: str | None, record: Record) -> str:
        """See Store.  A takeover also conflicts if the old leader's lease was renewed since the
        last read: it is there."""
        data = encode(record).decode()
        return self._until_done(lambda: self._swapped(version, record, data))

    def _swapped(self, version: str | None, record: Record, data: str) -> str:
        lease = self._get()
        found = self._found(lease)
        if version != (found.version if found is not None else None) or self._is_alive(
            found, record
        ):
            raise Conflict(found)
        new = secrets.token_hex(16)
        before = found.record.leader if found is not None else None
        wanted = copy.deepcopy(lease) if lease is not None else self._blank()
        _annotations(wanted).update({RECORD: data, VERSION: new})
        if record.leader != before:
            self._begin_lease(wanted, record.leader)
        self._put(wanted)
        return new

    def _is_alive(self, found: HeldRecord | None, record: Record) -> bool:
        """Whether the leader that is to be relieved renewed its lease after it was read here."""
        with self._guard:
            read = self._read
        if found is None or read is None or record.leader in (None, found.record.leader):
            return False
        return found.version == read[0] and found.lease not in (None, read[1])

    def _begin_lease(self, wanted: Lease, leader: ReplicaId | None) -> None:
        annotations, spec = _annotations(wanted), _spec(wanted)
        with self._guard:
            has_lease = leader is not None and leader.disk in self._renewed
            if leader is not None and has_lease:
                self._held.add(leader.disk)
        spec.leaseDurationSeconds = self._lease_s
        spec.leaseTransitions = (spec.leaseTransitions or 0) + 1
        spec.holderIdentity = str(leader) if has_lease else None
        spec.acquireTime = spec.renewTime = _now() if has_lease else None
        annotations.pop(LEASE, None)
        if has_lease:
            annotations[LEASE] = self._number()

    def _blank(self) -> Lease:
        return Lease(
            metadata=ObjectMeta(name=self._group, labels=dict(LABELS), annotations={}),
            spec=LeaseSpec(),
        )

    # -- the lease

    def renew(self, leader: ReplicaId) -> None:
        """See Store.  Before the takeover nothing is written: the lease begins with it."""
        with self._guard:
            seen, self._seen = self._seen, None
        if seen is not None and self._leader_of(seen) != leader:
            seen = None
        known = [seen] if seen is not None else []
        self._until_done(lambda: self._renew(leader, known.pop() if known else self._get()))

    def _renew(self, leader: ReplicaId, lease: Lease | None) -> None:
        leads = self._leader_of(lease)
        if lease is None or leads != leader:
            with self._guard:
                if leader.disk in self._held:
                    raise StoreError(f"{leads or 'nobody'} leads {self._group}")
                self._renewed.add(leader.disk)
            return
        wanted = copy.deepcopy(lease)
        spec = _spec(wanted)
        if spec.holderIdentity != str(leader) or spec.acquireTime is None:
            spec.acquireTime = _now()
        spec.holderIdentity = str(leader)
        spec.leaseDurationSeconds = self._lease_s
        spec.renewTime = _now()
        _annotations(wanted)[LEASE] = self._number()
        self._put(wanted)
        with self._guard:
            self._held.add(leader.disk)

    def release(self, leader: ReplicaId) -> None:
        """See Store."""
        with self._guard:
            self._renewed.discard(leader.disk)
            self._held.discard(leader.disk)
        self._until_done(lambda: self._release(leader))

    def _release(self, leader: ReplicaId) -> None:
        lease = self._get()
        if lease is None or self._leader_of(lease) != leader or LEASE not in _annotations(lease):
            return
        wanted = copy.deepcopy(lease)
        del _annotations(wanted)[LEASE]
        _spec(wanted).holderIdentity = None
        self._put(wanted)

    def _number(self) -> str:
        with self._guard:
            self._renewals += 1
            return f"{secrets.token_hex(4)} {self._renewals}"

    # -- the object

    def _until_done(self, write: Callable[[], T]) -> T:
        """Again, if the Lease moved meanwhile: then nothing was written."""
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(MovedError),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_random(0, 0.05),
            reraise=True,
        )
        try:
            return attempts(write)
        except MovedError as error:
            raise StoreError(f"Lease {self._group} changes too often: {error}") from error

    def _get(self) -> Lease | None:
        lease = self._api.get()
        self._saw(lease)
        return lease

    def _put(self, lease: Lease) -> None:
        self._saw(None)  # what is there now is not known until it is answered
        metadata = lease.metadata
        assert metadata is not None
        metadata.managedFields = None
        spec = _spec(lease)
        spec.acquireTime = _with_fraction(spec.acquireTime)
        spec.renewTime = _with_fraction(spec.renewTime)
        write = self._api.create if metadata.resourceVersion is None else self._api.replace
        self._saw(write(lease))

    def _saw(self, lease: Lease | None) -> None:
        with self._guard:
            self._seen = lease

    def _leader_of(self, lease: Lease | None) -> ReplicaId | None:
        found = self._found(lease)
        return found.record.leader if found is not None else None

    def _found(self, lease: Lease | None) -> HeldRecord | None:
        """Raises StoreError."""
        if lease is None:
            return None
        annotations = _annotations(lease)
        try:
            record = decode(annotations[RECORD].encode())
            return HeldRecord(annotations[VERSION], record, annotations.get(LEASE))
        except KeyError as error:
            raise StoreError(f"Lease {self._group} is not DueMQ's: it has no {error}") from error
        except (ValueError, UnknownVersion) as error:
            raise StoreError(f"Lease {self._group}: {error}") from error


def _annotations(lease: Lease) -> dict[str, str]:
    assert lease.metadata is not None
    if lease.metadata.annotations is None:
        lease.metadata.annotations = {}
    return lease.metadata.annotations


def _spec(lease: Lease) -> LeaseSpec:
    if lease.spec is None:
        lease.spec = LeaseSpec()
    return lease.spec


def _now() -> datetime:
    return datetime.now(UTC)


def _with_fraction(time: datetime | None) -> datetime | None:
    """Kubernetes' MicroTime must have a fraction, which is not written where it is zero."""
    return time.replace(microsecond=time.microsecond or 1) if time is not None else None
