"""A message id of the SDK is looked for where its time says, then everywhere."""

import time
from collections.abc import AsyncIterator

import pytest

from duemq.administering import finding
from duemq.aio import Admin, Producer
from duemq.protocol import message_ids
from duemq.v1 import broker_pb2, message_pb2
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, running_cluster

DAY_MS = 86_400_000


def id_of(begun_ms: int) -> str:
    return (message_ids.MessageIds().head(begun_ms) + b"00a").decode()


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0", "b1") as made:
        yield made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(broker, from_ms) of every look-up."""
    noted: list[tuple[str, int]] = []
    ask = finding.messages_at

    def noting(asker, broker, request, deadline):
        noted.append((broker, request.from_ms))
        return ask(asker, broker, request, deadline)

    monkeypatch.setattr(finding, "messages_at", noting)
    return noted


async def test_what_the_sdk_sent_is_found_in_one_go(cluster: Cluster, asked) -> None:
    topic = topic_name()
    async with Producer(cluster.nameserver) as producer, Admin(cluster.nameserver) as admin:
        receipts = [await producer.send(topic, b"%d" % number) for number in range(8)]
        for number, receipt in enumerate(receipts):
            found = await admin.find_messages(topic, message_id=receipt.message_id)
            assert [message.body for message in found.messages] == [b"%d" % number]
    assert len(asked) == 2 * len(receipts)
    assert all(from_ms for _, from_ms in asked)


async def test_what_was_stored_long_after_is_found_all_the_same(cluster: Cluster, asked) -> None:
    topic = topic_name()
    yesterday = id_of(time.time_ns() // 1_000_000 - DAY_MS)
    records = [message_pb2.Record(message_id=each, body=b"x") for each in (yesterday, "another")]
    async with Admin(cluster.nameserver) as admin:
        await cluster.create_topic(topic, queues=1)
        batch = message_pb2.RecordBatch(records=records)
        await cluster.clients["b1"].send(broker_pb2.Batch(topic=topic, records=batch))
        found = await admin.find_messages(topic, message_id=yesterday)
        assert [message.message_id for message in found.messages] == [yesterday]
        assert len(asked) == 4
        assert {broker for broker, from_ms in asked if not from_ms} == {"b0", "b1"}
        assert (await admin.find_messages(topic, message_id="another")).messages
        assert len(asked) == 6
        assert not (await admin.find_messages(topic, message_id=id_of(1))).messages
