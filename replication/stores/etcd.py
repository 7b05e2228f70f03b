"""A store in etcd.

key                        value
<prefix>/<group>/record    the record
<prefix>/<group>/version   random, written with each record: what a compare-and-set compares
<prefix>/<group>/lease/<disk id>   a number that each renewal changes; goes with its etcd lease

The version is not etcd's mod_revision, which comes again after a restore from a backup.  Reads are
linearizable.  A read or a renewal is tried at each endpoint; a swap at one, once: if its answer is
lost, nobody knows whether it was done, and it may be done yet.

etcd gives every lease its whole time again when its own leader changes, so candidates wait for the
number to stand still, too (replication/protocol/election.py).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from duemq.transport.channel import OPTIONS
from duemq.transport.tls import Certificates
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId, decode, encode
from duemq_server.replication.stores.etcd_v3 import rpc_pb2, stubs
from duemq_server.replication.stores.store import Conflict, StoreError
from duemq_server.storage.errors import UnknownVersion

CALL_TIMEOUT_S = 2.0
"""Of one call to one endpoint."""
PREFIX = "duemq"


class EtcdStore:
    """Implements duemq_server.replication.stores.store.Store; any thread."""

    look_s = 0.1

    def __init__(
        self,
        endpoints: Sequence[str],
        group: str,
        *,
        lease_s: int,
        prefix: str = PREFIX,
        certificates: Certificates | None = None,
    ) -> None:
        """`endpoints`: host:port each; with `certificates`, over TLS."""
        if not endpoints or not group:
            raise ValueError("a store in etcd needs endpoints and a group")
        folder = f"{prefix}/{group}"
        self._record = f"{folder}/record".encode()
        self._version = f"{folder}/version".encode()
        self._lease_prefix = f"{folder}/lease/"
        self._lease_s = lease_s
        self._addresses = tuple(endpoints)
        self._certificates = certificates
        self._endpoints = self._connected()
        self._older: list[_Endpoint] = []  # of the certificates before, for the calls in them
        self._current = 0
        self._leases: dict[str, int] = {}  # etcd's ids, by disk id
        self._renewals = 0
        self._guard = threading.Lock()  # guards _leases, _renewals
        self._renewing = threading.Lock()  # guards _endpoints, _older and the certificates

    def close(self) -> None:
        """Closes the connections.  Leases run out by themselves."""
        for each in (*self._endpoints, *self._older):
            each.close()

    # -- the record

    def read(self) -> HeldRecord | None:
        """See Store."""
        # No transaction, in which an etcd before 3.5.5 ends by the deadline of whoever only reads
        # (etcd-io/etcd#14110).
        both = rpc_pb2.RangeRequest(key=self._record, range_end=self._version + b"\0")
        kvs = self._anywhere(lambda etcd: etcd.get(both))
        with self._translated():
            found = self._found(kvs)
        if found is None or found.record.leader is None:
            return found
        return HeldRecord(found.version, found.record, self._lease_of(found.record.leader))

    def swap(self, version: str | None, record: Record) -> str:
        """See Store."""
        new = secrets.token_hex(16)
        request = rpc_pb2.TxnRequest(
            compare=[self._is_at(version)],
            success=[_put(self._record, encode(record)), _put(self._version, new.encode())],
            failure=[_get(self._record), _get(self._version)],
        )
        with self._translated():
            answer = self._here(lambda etcd: etcd.transact(request))
            if not answer.succeeded:
                kvs = [kv for each in answer.responses for kv in each.response_range.kvs]
                raise Conflict(self._found(kvs))
        return new

    def _found(self, kvs: Iterable[rpc_pb2.KeyValue]) -> HeldRecord | None:
        """The record and its version, which come and go together.

        Raises ValueError, UnknownVersion.
        """
        values = {each.key: each.value for each in kvs}
        record, version = values.get(self._record), values.get(self._version)
        if record is None and version is None:
            return None
        if record is None or version is None:  # nor could a record be put there
            gone, left = ("record", "version") if record is None else ("version", "record")
            raise ValueError(f"somebody removed `{gone}` alone: remove `{left}`, too")
        return HeldRecord(version.decode(), decode(record))

    def _is_at(self, version: str | None) -> rpc_pb2.Compare:
        equal = rpc_pb2.Compare.EQUAL
        if version is None:
            target = rpc_pb2.Compare.CREATE
            return rpc_pb2.Compare(
                result=equal, target=target, key=self._version, create_revision=0
            )
        target = rpc_pb2.Compare.VALUE
        return rpc_pb2.Compare(
            result=equal, target=target, key=self._version, value=version.encode()
        )

    # -- the lease

    def renew(self, leader: ReplicaId) -> None:
        """See Store."""
        with self._guard:
            self._renewals += 1
            value = f"{secrets.token_hex(4)} {self._renewals}".encode()
            lease = self._leases.pop(leader.disk, 0)
            if not lease or not self._anywhere(lambda etcd: etcd.keep_alive(lease)):
                lease = self._anywhere(lambda etcd: etcd.grant(self._lease_s))
            put = rpc_pb2.PutRequest(key=self._lease_key(leader), value=value, lease=lease)
            self._anywhere(lambda etcd: etcd.put(put))
            self._leases[leader.disk] = lease

    def release(self, leader: ReplicaId) -> None:
        """See Store."""
        with self._guard:
            lease = self._leases.pop(leader.disk, 0)
            if lease:
                self._anywhere(lambda etcd: etcd.revoke(lease))

    def _lease_of(self, leader: ReplicaId) -> str | None:
        request = rpc_pb2.RangeRequest(key=self._lease_key(leader))
        kvs = self._anywhere(lambda etcd: etcd.get(request))
        return kvs[0].value.decode() if kvs else None

    def _lease_key(self, leader: ReplicaId) -> bytes:
        return f"{self._lease_prefix}{leader.disk}".encode()

    # -- endpoints

    def _here(self, call: Callable[[_Endpoint], Any]) -> Any:
        """At one endpoint; if that fails, the next call goes to another.  Raises StoreError."""
        at = self._current
        endpoint = self._up_to_date()[at]
        try:
            return call(endpoint)
        except grpc.RpcError as error:
            self._current = (at + 1) % len(self._addresses)
            raise StoreError(f"etcd at {endpoint.address}: {_said(error)}") from error

    def _anywhere(self, call: Callable[[_Endpoint], Any]) -> Any:
        """What may be done twice: at each endpoint until one answers.  Raises StoreError."""
        for _ in self._addresses[1:]:
            try:
                return self._here(call)
            except StoreError:
                continue
        return self._here(call)

    def _connected(self) -> list[_Endpoint]:
        certificates, credentials = self._certificates, None
        if certificates is not None:
            ca, cert, key = certificates.pems
            credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return [_Endpoint(each, credentials) for each in self._addresses]

    def _up_to_date(self) -> list[_Endpoint]:
        """Others once the certificates have changed: a channel keeps what it was made with."""
        if self._certificates is not None:
            with self._renewing:
                if self._certificates.renew():
                    for each in self._older:
                        each.close()
                    self._older, self._endpoints = self._endpoints, self._connected()
        return self._endpoints

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, UnknownVersion) as error:
            raise StoreError(f"{self._record.decode()}: {error}") from error


class _Endpoint:
    """One address of etcd; connects with the first call."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        options = list(OPTIONS)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._kv = stubs.KVStub(self._channel)
        self._lease = stubs.LeaseStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def get(self, request: rpc_pb2.RangeRequest) -> Sequence[rpc_pb2.KeyValue]:
        return self._kv.Range(request, timeout=CALL_TIMEOUT_S).kvs

    def transact(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        return self._kv.Txn(request, timeout=CALL_TIMEOUT_S)

    def put(self, request: rpc_pb2.PutRequest) -> None:
        self._kv.Put(request, timeout=CALL_TIMEOUT_S)

    def grant(self, seconds: int) -> int:
        request = rpc_pb2.LeaseGrantRequest(TTL=seconds)
        return self._lease.LeaseGrant(request, timeout=CALL_TIMEOUT_S).ID

    def revoke(self, lease: int) -> None:
        request = rpc_pb2.LeaseRevokeRequest(ID=lease)
        try:
            self._lease.LeaseRevoke(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:  # it ran out before
                raise

    def keep_alive(self, lease: int) -> bool:
        """False if there is no such lease any more."""
        request = rpc_pb2.LeaseKeepAliveRequest(ID=lease)
        for answer in self._lease.LeaseKeepAlive(iter([request]), timeout=CALL_TIMEOUT_S):
            return bool(answer.TTL > 0)
        return False


def _get(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))


def _put(key: bytes, value: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value))


def _said(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
