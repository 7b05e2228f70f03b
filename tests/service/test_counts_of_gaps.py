"""A log that lost its end leaves a gap in its queues: no count and no lag has it as messages."""

import asyncio
from dataclasses import replace

import pytest

from duemq.aio import Admin
from duemq.errors import OffsetOutOfRange, Unavailable
from duemq.v1 import broker_pb2
from duemq_analytics.options import Options
from duemq_analytics.source import plan
from duemq_analytics.source.client import QueueClient
from duemq_server.broker.store import recovery
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.tools.cut import cut
from tests.service.running_cluster import Cluster, running_cluster

TOPIC, GROUP = "orders", "billing"


@pytest.fixture
async def cluster(tmp_path):
    """Offsets 0 to 5 are there, 6 to 9 are lost, 10 and 11 are there; 2 are consumed."""
    async with running_cluster(tmp_path, "b0") as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        for number in range(6):
            await cluster.send(TOPIC, [b"%d" % number])
        kept = cluster.brokers["b0"].store.log.durable_position
        for number in range(6, 10):
            await cluster.send(TOPIC, [b"%d" % number])
        commit = broker_pb2.OffsetCommit(topic=TOPIC, queue_id=0, offset=2)
        await cluster.clients["b0"].broker.CommitOffsets(
            broker_pb2.CommitOffsetsRequest(group=GROUP, commits=[commit])
        )
        await cluster.stop_broker("b0")
        cut(str(tmp_path / "b0" / recovery.LOG_DIRECTORY), kept, RealDisk())
        await cluster.start_broker("b0")
        for number in range(2):
            await cluster.send(TOPIC, [b"%d" % number], producer_id=99, sequence=number)
        yield cluster


@pytest.mark.parametrize("past", [0, 1], ids=["before-the-gap-ends", "whole"])
async def test_a_reader_of_ranges_fails_at_the_gap_or_steps_over_it_on_request(
    cluster: Cluster, past: int, caplog: pytest.LogCaptureFixture
) -> None:
    def read(options: Options) -> list[bytes]:
        with QueueClient((cluster.nameserver,), timeout_s=60) as client:
            [whole] = plan.ranges(client.queues(options), options)
            piece = whole if past else replace(whole, end=whole.end - 2)
            found = client.read(TOPIC, piece, fail_on_data_loss=options.fail_on_data_loss)
            return [record.body for run in found for record in run.records]

    strict = Options(TOPIC, nameservers=(cluster.nameserver,))
    with pytest.raises((OffsetOutOfRange, Unavailable), match="offset 6"):
        await asyncio.to_thread(read, strict)
    found = await asyncio.to_thread(read, replace(strict, fail_on_data_loss=False))
    assert found == [b"0", b"1", b"2", b"3", b"4", b"5", b"0", b"1"][: 6 + 2 * past]
    assert "offset 6 was asked for" in caplog.text


async def test_counts_leave_out_what_is_lost(cluster: Cluster) -> None:
    async with Admin(cluster.nameserver) as admin:
        described = await admin.describe_topic(TOPIC)
        [queue] = described.queues
        assert queue.max_offset - queue.min_offset > 8, "there is no gap to count"
        assert (described.messages, queue.messages) == (8, 8)
        [purged] = await admin.purge_topic(TOPIC, dry_run=True)
        assert purged.messages == 8

        await admin.reset_offsets(GROUP, TOPIC, offset=2)
        [progress] = (await admin.describe_group(GROUP)).progress
        assert (progress.offset, progress.lag) == (2, 6)
        [group] = await admin.groups(lag=True)
        assert group.lag == 6

        await admin.purge_topic(TOPIC)
        assert (await admin.describe_topic(TOPIC)).messages == 0
        [progress] = (await admin.describe_group(GROUP)).progress
        assert progress.lag == 0
