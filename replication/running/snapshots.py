"""Sends a leader's snapshot, and fetches it: for a replica whose log ends before the leader's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from duemq.errors import Corrupt, Unavailable
from duemq.settings import Tls
from duemq.transport import channel
from duemq_server.replication.protocol.follower import StreamBroken
from duemq_server.replication.protocol.record import Record
from duemq_server.replication.running.state import Arriving, Leaving
from duemq_server.replication.running.threads import in_thread
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.running.v1 import stubs
from duemq_server.serving.clock import steady_ms
from duemq_server.storage.errors import DiskFull

PART_BYTES = 1 << 20
PART_BYTES_MIN = 64 << 10
"""Whatever `catch_up_rate` is: the least rate is twice that a second."""
PACE_MS = 500
"""Between two parts, at most."""
SILENCE_S = 30.0
"""Without a part; the first one waits for the leader's disk."""


async def send(
    leaving: Leaving,
    rate: int,
    write: Callable[[pb.SnapshotPart], Awaitable[None]],
    is_over: Callable[[], bool],
) -> None:
    """All of it, at `rate` bytes a second; 0: no limit.  The living come first.

    Raises Unavailable when the term `is_over`.
    """
    part_bytes = PART_BYTES
    if rate:
        part_bytes = min(max(rate * PACE_MS // 1000, PART_BYTES_MIN), PART_BYTES)
    began_ms, sent = steady_ms(), 0
    while data := await in_thread(leaving.read, part_bytes):
        if is_over():
            raise Unavailable("another replica is about to lead: ask that one", field="leader")
        await write(pb.SnapshotPart(data=data))
        sent += len(data)
        due_s = wait_s(sent, rate, steady_ms() - began_ms)
        await asyncio.sleep(min(due_s, PACE_MS / 1000))  # who hears nothing gives it up


def wait_s(sent: int, rate: int, passed_ms: int) -> float:
    """Until more may be sent, of what has sent so much in so long."""
    return max(0.0, sent / rate - passed_ms / 1000) if rate else 0.0


async def fetch(
    address: str, record: Record, name: str, arriving: Arriving, tls: Tls | None = None
) -> int:
    """All of the leader's, for the replica `name`; answers where its log begins.

    Raises StreamBroken, DiskFailed.
    """
    request = pb.GetSnapshotRequest(
        group=record.group, store_id=record.store_id, epoch=record.epoch, replica=name
    )
    try:
        async with channel.connect(address, tls) as connection:
            return await _fetch(stubs.ReplicationStub(connection).GetSnapshot(request), arriving)
    except grpc.aio.AioRpcError as error:
        raise StreamBroken(f"no snapshot from {address}: {error.details()}") from error
    except TimeoutError as error:
        raise StreamBroken(f"the leader at {address} is silent") from error
    except (ValueError, Corrupt) as error:
        raise StreamBroken(f"the leader's snapshot is of no use: {error}") from error
    except DiskFull as error:
        raise StreamBroken(f"no space for the leader's snapshot: {error}") from error


async def _fetch(call: Any, arriving: Arriving) -> int:
    log_start = 0
    while True:
        async with asyncio.timeout(SILENCE_S):
            part = await call.read()
        if part is grpc.aio.EOF:
            return log_start
        log_start = log_start or part.log_start
        if part.data:
            await in_thread(arriving.write, part.data)
