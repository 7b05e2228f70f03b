"""`duemq group show`, and a consumer, say why queues wait: for who was there, or who is leaving."""

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from duemq.aio import PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.protocol import balance
from duemq.transport import channel
from duemq.v1 import group_pb2, stubs
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
        call = stubs.GroupCoordinatorStub(connection).Join()
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
                away = stubs.GroupCoordinatorStub(connection).Join()
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


async def test_who_closes_and_waits_for_a_callback_is_told(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def receive(message: object) -> None:
        entered.set()
        leave.wait(60)

    async with running_cluster(tmp_path, "b0") as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        await cluster.send(TOPIC, [b"slow"], broker="b0", queue_id=0)
        settings = ConsumerSettings(start_from="earliest", close_timeout_s=300)
        consumer = PushConsumer(
            GROUP, TOPIC, receive, nameserver=cluster.nameserver, settings=settings
        )
        await consumer.start()
        await until(entered.is_set)
        closing = asyncio.create_task(consumer.close())
        try:

            async def only_the_busy_queue_is_its_own() -> bool:
                said = rows(await run(cluster.nameserver, "group", "show", GROUP, "--json"))
                [member] = [row for row in said if row["kind"] == "member"]
                busy = {"topic": TOPIC, "broker": "b0", "queue": 0}
                return member["leaving"] and member["queues"] == [busy]

            await until(only_the_busy_queue_is_its_own)
            assert "  leaving" in (await run(cluster.nameserver, "group", "show", GROUP)).stdout
        finally:
            leave.set()
            await closing
