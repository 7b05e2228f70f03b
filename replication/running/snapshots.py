"""Fetches a leader's snapshot: for a replica whose log ends before the leader's begins."""

from __future__ import annotations

from typing import NamedTuple

import grpc.aio

from duemq.transport import channel
from duemq_server.replication.protocol.follower import StreamBroken
from duemq_server.replication.protocol.record import Record
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.running.v1 import replication_pb2_grpc

PART_BYTES = 1 << 20
SNAPSHOT_BYTES_MAX = 1 << 30
FETCH_TIMEOUT_S = 120.0


class Snapshot(NamedTuple):
    """What the leader's state was, and where its log begins."""

    log_start: int
    data: bytes


async def fetch(address: str, record: Record) -> Snapshot:
    """Raises StreamBroken."""
    request = pb.GetSnapshotRequest(
        group=record.group, store_id=record.store_id, epoch=record.epoch
    )
    log_start, parts, size = 0, [], 0
    try:
        async with channel.connect(address) as connection:
            stub = replication_pb2_grpc.ReplicationStub(connection)
            call = stub.GetSnapshot(request, timeout=FETCH_TIMEOUT_S)
            async for part in call:
                log_start = log_start or part.log_start
                parts.append(part.data)
                size += len(part.data)
                if size > SNAPSHOT_BYTES_MAX:
                    raise StreamBroken(f"a snapshot of more than {SNAPSHOT_BYTES_MAX} bytes")
    except grpc.aio.AioRpcError as error:
        raise StreamBroken(f"no snapshot from {address}: {error.details()}") from error
    return Snapshot(log_start, b"".join(parts))
