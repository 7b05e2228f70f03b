"""`duemq group show`, and a consumer, say why nothing comes when queues wait for former members."""

import logging
from pathlib import Path

import pytest

from duemq.aio import PushConsumer
from duemq.protocol import balance
from duemq.transport import channel
from duemq.v1 import group_pb2, group_pb2_grpc
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import running_cluster, until

GROUP, TOPIC = "billing", "orders"


async def test_who_waits_for_members_of_before_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "duemq")
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        coordinator = balance.coordinator(GROUP, ["b0", "b1"]) or ""
        connection = channel.connect(cluster.brokers[coordinator].server.address)
        call = group_pb2_grpc.GroupCoordinatorStub(connection).Join()
        hello = group_pb2.Hello(
            group=GROUP,
            member_id="came-back",
            subscriptions=[group_pb2.Subscription(topic=TOPIC)],
            session_timeout_ms=300_000,
            generation=7,
            members=["came-back", "still-away"],
        )
        consumer = PushConsumer(GROUP, TOPIC, lambda message: None, nameserver=cluster.nameserver)
        try:
            await call.write(group_pb2.MemberEvent(hello=hello))
            event = await call.read()
            assert 0 < event.assignment.waits_ms <= 300_000
            assert not event.assignment.queues
            async with consumer:
                await until(lambda: "billing: its queues wait" in caplog.text)
                shown = await run(cluster.nameserver, "group", "show", GROUP)
                assert "queues wait until" in shown.stdout
                [group, *_] = rows(await run(cluster.nameserver, "group", "show", GROUP, "--json"))
                assert group["waits_until_ms"] > 0
                # The last of them says goodbye: nobody is awaited.
                away = group_pb2_grpc.GroupCoordinatorStub(connection).Join()
                hello.member_id = "still-away"
                await away.write(group_pb2.MemberEvent(hello=hello))
                await away.write(group_pb2.MemberEvent(leave=group_pb2.Leave()))
                await away.done_writing()
                async for _ in away:
                    """Until the coordinator has heard it."""
                shown = await run(cluster.nameserver, "group", "show", GROUP)
                assert "queues wait" not in shown.stdout
        finally:
            call.cancel()
            await connection.close()
