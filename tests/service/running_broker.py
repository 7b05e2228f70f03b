"""A broker in this process, on a free port, without a nameserver; and what clients do to it."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from duemq.protocol.record_bytes import text_hash
from duemq.transport import channel, status
from duemq.v1 import (
    broker_pb2,
    message_pb2,
    stubs,
)
from duemq_server.broker.process import Broker
from duemq_server.broker.settings import Settings
from duemq_server.storage.dirlock import DirLock

# Nobody listens there: the broker does without.
NO_NAMESERVER = ("127.0.0.1:1",)


class Client:
    """Stubs of one broker."""

    def __init__(self, connection: grpc.aio.Channel) -> None:
        self.connection = connection
        self.broker = stubs.BrokerStub(connection)
        self.admin = stubs.BrokerAdminStub(connection)
        self.groups = stubs.GroupCoordinatorStub(connection)
        self.group_admin = stubs.GroupAdminStub(connection)
        self.timer_admin = stubs.TimerAdminStub(connection)
        self.message_admin = stubs.MessageAdminStub(connection)
        self.raw_send: Any = connection.unary_unary("/duemq.v1.Broker/Send")

    async def send(self, *batches: broker_pb2.Batch) -> list[broker_pb2.BatchResult]:
        request = broker_pb2.SendRequest(request_id=1, batches=batches)
        response = await status.answer(self.broker.Send(request, timeout=30))
        assert response.request_id == 1
        return list(response.results)

    async def pull(
        self, topic: str, queue_id: int = 0, offset: int = 0, **fields: Any
    ) -> broker_pb2.PullResponse:
        pull = {
            name: fields.pop(name)
            for name in ("generation", "filter", "filter_type", "topic_id")
            if name in fields
        }
        queue = broker_pb2.QueuePull(topic=topic, queue_id=queue_id, offset=offset, **pull)
        request = broker_pb2.PullRequest(request_id=1, queues=[queue], **fields)
        return await status.answer(self.broker.Pull(request, timeout=30))

    async def bodies(self, topic: str, queue_id: int = 0, offset: int = 0) -> list[bytes]:
        """All of a queue, pull after pull."""
        found: list[bytes] = []
        while True:
            response = await self.pull(topic, queue_id, offset)
            if not response.queues:
                return found
            [records] = response.queues
            if records.HasField("error"):
                raise status.from_proto(records.error)
            found += [record.body for record in records.records.records]
            offset = records.next_offset


@asynccontextmanager
async def running_broker(data_dir: Path, **settings: Any) -> AsyncIterator[tuple[Broker, Client]]:
    """A broker and a client of it; stopped cleanly at the end."""
    given = {
        "name": "b1",
        "listen": "127.0.0.1:0",
        "nameservers": NO_NAMESERVER,
        "drain_timeout": 1.0,
        **settings,
    }
    with DirLock(str(data_dir)):
        broker = Broker(Settings(data_dir=str(data_dir), **given))
        await broker.start(announced=False)
        try:
            async with channel.connect(broker.server.address, broker.settings.tls) as connection:
                yield broker, Client(connection)
        finally:
            await broker.stop()


def topic_name() -> str:
    return f"t-{secrets.token_hex(4)}"


def records_of(bodies: list[bytes], tags: list[str] | None = None) -> message_pb2.RecordBatch:
    tags = tags or [""] * len(bodies)
    return message_pb2.RecordBatch(
        records=[
            message_pb2.Record(body=body, message_id=f"m{number}", tag=tag)
            for number, (body, tag) in enumerate(zip(bodies, tags, strict=True))
        ]
    )


def batch(
    topic: str,
    bodies: list[bytes],
    *,
    tags: list[str] | None = None,
    arrays: bool = True,
    **fields: Any,
) -> broker_pb2.Batch:
    """As the SDK sends it; without `arrays` as a plain generated client does."""
    records = records_of(bodies, tags)
    made = broker_pb2.Batch(topic=topic, records=records, **fields)
    if arrays:
        entries = [
            message_pb2.RecordBatch(records=[record]).ByteSize() for record in records.records
        ]
        made.sizes.extend(entries)
        made.tag_hashes.extend(text_hash(record.tag.encode()) for record in records.records)
        made.key_hashes.extend(0 for _ in entries)
    return made
