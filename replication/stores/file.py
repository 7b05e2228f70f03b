"""A store in a directory, for replicas on one machine: its kernel is the arbiter.

file                     what
<group>.record           {"version": random, "record": {…}}; replaced as a whole, durably
<group>.lock             flock: held from the comparison to the rename
<group>.lease-<disk id>  a number that each renewal changes; flock while its process lives

The directory must be local: flock and rename of a network file system are not relied on.  A leader
that dies is seen at once, because the kernel frees its lease; one that is stopped holds it, and is
seen by the number that stands still.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId, decode, encode
from duemq_server.replication.stores.store import Conflict, StoreError
from duemq_server.storage.errors import UnknownVersion

LOCK_WAIT_S = 2.0
"""A swap takes milliseconds; who holds the lock so long was stopped in the middle of one."""
_POLL_S = 0.005


class FileStore:
    """Implements duemq_server.replication.stores.store.Store; any thread."""

    look_s = 0.1

    def __init__(self, directory: str, group: str) -> None:
        if not group or "/" in group or group.startswith("."):
            raise ValueError(f"{group!r} names no group")
        os.makedirs(directory, exist_ok=True)
        self._directory = directory
        self._path = os.path.join(directory, f"{group}.record")
        self._lock_path = os.path.join(directory, f"{group}.lock")
        self._lease_prefix = os.path.join(directory, f"{group}.lease-")
        self._leases: dict[str, int] = {}  # descriptors of this process, by disk id
        self._renewals = 0
        self._guard = threading.Lock()  # guards _leases, _renewals

    # -- the record

    def read(self) -> HeldRecord | None:
        """See Store."""
        with self._translated():
            stored = self._stored()
            if stored is None:
                return None
            version, record = stored
            if record.leader is None:
                return HeldRecord(version, record)
            return HeldRecord(version, record, *self._lease_of(record.leader))

    def swap(self, version: str | None, record: Record) -> str:
        """See Store."""
        data = encode(record)
        with self._translated(), self._locked():
            stored = self._stored()
            if version != (stored[0] if stored else None):
                raise Conflict(HeldRecord(*stored) if stored else None)
            # Random, so that no version comes again after the record was removed.
            new = secrets.token_hex(16)
            self._replace(json.dumps({"version": new, "record": json.loads(data)}).encode())
            return new

    def _stored(self) -> tuple[str, Record] | None:
        try:
            with open(self._path, "rb") as file:
                fields = json.loads(file.read())
        except FileNotFoundError:
            os.stat(self._directory)  # a store that is away is no record that is gone
            return None
        return str(fields["version"]), decode(json.dumps(fields["record"]).encode())

    def _replace(self, data: bytes) -> None:
        temporary = self._path + ".tmp"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd, self._lock_path)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, UnknownVersion) as error:
            raise StoreError(f"{self._path}: {error}") from error

    # -- the lease

    def renew(self, leader: ReplicaId) -> None:
        """See Store."""
        with self._translated(), self._guard:
            self._renewals += 1
            fd = self._leases.get(leader.disk)
            if fd is None:
                self._leases[leader.disk] = self._take_lease(self._lease_prefix + leader.disk)
            else:
                self._write_lease(fd)

    def _take_lease(self, path: str) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd, path)  # who reads holds it for a moment
            self._write_lease(fd)
        except BaseException:
            os.close(fd)  # a lease that cannot be renewed is nobody's
            raise
        return fd

    def _write_lease(self, fd: int) -> None:
        """In place, no shorter than any release wrote it: that needs no space on a full disk."""
        os.pwrite(fd, f"{os.getpid():10d} {self._renewals:020d}\n".encode(), 0)

    def release(self, leader: ReplicaId) -> None:
        """See Store."""
        with self._translated(), self._guard:
            fd = self._leases.pop(leader.disk, None)
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        """Ends every lease that this object renewed."""
        with self._guard:
            while self._leases:
                os.close(self._leases.popitem()[1])

    def _lease_of(self, leader: ReplicaId) -> tuple[str | None, bool]:
        """The lease, and whether its process has ended."""
        try:
            fd = os.open(self._lease_prefix + leader.disk, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None, False
        try:
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None, True  # nobody holds it
            return os.pread(fd, 64, 0).decode("ascii", "replace"), False
        finally:
            os.close(fd)


def _lock(fd: int, path: str) -> None:
    """flock, but not for ever: who holds it may be stopped.  Raises OSError."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() >= deadline:
            raise OSError(f"{path} is locked for more than {LOCK_WAIT_S} s")
        time.sleep(_POLL_S)
