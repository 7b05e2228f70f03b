"""Who may do what: every client by its certificate, through the SDK."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pytest

from duemq.aio import Admin, Producer, PullConsumer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import PermissionDenied
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.settings import ClientSettings, ProducerSettings, Tls
from duemq.transport import channel
from duemq.v1 import admin_pb2, broker_pb2, message_pb2
from duemq_server.local_cluster import ClusterFailed, readiness
from duemq_server.local_cluster.supervisor import ChildPlace
from duemq_server.serving.permissions.rights import parse
from tests.certificates import authority, certificate, needs_openssl
from tests.service.played_timer import claim_queues
from tests.service.running_broker import Client, batch, running_broker
from tests.service.running_cluster import WAIT_S, running_cluster, until

pytestmark = needs_openssl

ALLOWED = """
[[allow]]
names = ["cluster"]
service = true

[[allow]]
names = ["shop"]
send = ["orders*"]

[[allow]]
names = ["billing"]
receive = ["orders"]
groups = ["billing"]

[[allow]]
names = ["operator"]
admin = true
"""


class Guarded:
    """A cluster with permissions, and the certificates of its clients."""

    def __init__(self, directory: Path) -> None:
        self._ca = authority(directory)
        self.file = directory / "permissions.toml"
        self.file.write_text(ALLOWED)
        mine = self.tls("cluster")
        self.settings = {
            "tls_cert": mine.cert,
            "tls_key": mine.key,
            "tls_ca": mine.ca,
            "tls_verify_clients": True,
            "permissions": str(self.file),
        }

    def tls(self, name: str) -> Tls:
        return certificate(self._ca, name)

    def client(self, name: str) -> ClientSettings:
        return ClientSettings(tls=self.tls(name))

    def producer(self, cluster, name: str) -> Producer:
        settings = ProducerSettings(client=self.client(name))
        return Producer(cluster.nameserver, settings=settings)

    def consumer_settings(self, name: str) -> ConsumerSettings:
        return ConsumerSettings(client=self.client(name), start_from="earliest")

    def admin(self, cluster, name: str) -> Admin:
        return Admin(cluster.nameserver, settings=self.client(name))


async def repeated(act: Callable[[], Awaitable[object]]) -> None:
    """Until it fails."""
    while True:
        await act()


@pytest.fixture
def guarded(tmp_path):
    return Guarded(tmp_path)


async def test_each_does_what_it_may(tmp_path, guarded):
    async with running_cluster(tmp_path, "b0", "b1", **guarded.settings) as cluster:
        async with guarded.producer(cluster, "shop") as producer:
            for number in range(20):
                await producer.send("orders", b"%d" % number)
        received: set[bytes] = set()
        consumer = PushConsumer(
            "billing",
            "orders",
            lambda message: received.add(message.body),
            nameserver=cluster.nameserver,
            settings=guarded.consumer_settings("billing"),
        )
        async with consumer:
            await until(lambda: len(received) == 20)
        async with guarded.admin(cluster, "operator") as admin:
            assert {each.name for each in await admin.topics()} == {"orders"}
            await admin.delete_topic("orders")


async def test_a_topic_that_one_may_not_send_to_holds_up_no_other(tmp_path, guarded):
    async with (
        running_cluster(tmp_path, "b0", **guarded.settings) as cluster,
        guarded.producer(cluster, "shop") as producer,
        guarded.admin(cluster, "operator") as admin,
    ):
        await admin.create_topic("payments")
        with pytest.raises(PermissionDenied, match="shop may not send to topic payments") as said:
            await producer.send("payments", b"1")
        assert (said.value.field, said.value.value) == ("topic", "payments")
        refused, taken = await asyncio.gather(
            producer.send("payments", b"2"), producer.send("orders", b"3"), return_exceptions=True
        )
        assert isinstance(refused, PermissionDenied)
        assert taken.topic == "orders"
        with pytest.raises(PermissionDenied):  # nor make it
            await producer.send("refunds", b"4")


async def test_who_may_not_consume_hears_it_from_the_start(tmp_path, guarded):
    async with running_cluster(tmp_path, "b0", **guarded.settings) as cluster:
        async with guarded.producer(cluster, "shop") as producer:
            await producer.send("orders", b"1")
        for name, group, what in (
            ("shop", "billing", "consume in group billing"),
            ("billing", "audit", "consume in group audit"),
        ):
            consumer = PushConsumer(
                group,
                "orders",
                print,
                nameserver=cluster.nameserver,
                settings=guarded.consumer_settings(name),
            )
            with pytest.raises(PermissionDenied, match=f"{name} may not {what}"):
                await consumer.start()


async def test_a_member_that_loses_its_group_ends_and_says_so(tmp_path, guarded):
    async with running_cluster(tmp_path, "b0", **guarded.settings) as cluster:
        async with guarded.producer(cluster, "shop") as producer:
            await producer.send("orders", b"1")
        settings = replace(guarded.consumer_settings("billing"), session_timeout_s=1.5)
        consumer = PushConsumer(
            "billing", "orders", print, nameserver=cluster.nameserver, settings=settings
        )
        await consumer.start()
        guarded.file.write_text(ALLOWED.replace('groups = ["billing"]', ""))
        with pytest.raises(PermissionDenied, match="billing may not consume in group billing"):
            await consumer.run()


async def test_a_queue_that_one_may_not_read_is_refused_and_no_other(tmp_path, guarded):
    async with running_cluster(tmp_path, "b0", **guarded.settings) as cluster:
        async with guarded.producer(cluster, "shop") as producer:
            await producer.send("orders", b"1")
            await producer.send("orders-secret", b"2")
        mine = guarded.consumer_settings("billing")
        async with PullConsumer(nameserver=cluster.nameserver, settings=mine) as consumer:
            await consumer.assign("orders", start_from="earliest")
            assert [message.body for message in await consumer.poll(timeout_s=60)] == [b"1"]
            with pytest.raises(PermissionDenied, match="billing may not receive from topic"):
                await consumer.assign("orders-secret", start_from="earliest")


async def test_who_has_no_rights_finds_nobody_and_hears_why(tmp_path, guarded):
    async with running_cluster(tmp_path, "b0", **guarded.settings) as cluster:
        settings = ClientSettings(tls=guarded.tls("stranger"), connect_timeout_s=WAIT_S)
        with pytest.raises(PermissionDenied, match="stranger may not do anything"):
            await Producer(cluster.nameserver, settings=ProducerSettings(client=settings)).start()


async def test_what_needs_an_administrator_is_refused_to_others(tmp_path, guarded):
    async with (
        running_cluster(tmp_path, "b0", **guarded.settings) as cluster,
        guarded.admin(cluster, "shop") as admin,
    ):
        with pytest.raises(PermissionDenied, match="shop may not administer"):
            await admin.create_topic("orders")


async def test_a_file_that_changes_counts_for_streams_that_stand(tmp_path, guarded):
    async with (
        running_cluster(tmp_path, "b0", **guarded.settings) as cluster,
        guarded.producer(cluster, "shop") as producer,
    ):
        await producer.send("orders", b"1")
        guarded.file.write_text(ALLOWED.replace("orders*", "nothing"))
        with pytest.raises(PermissionDenied):
            await repeated(lambda: producer.send("orders", b"2"))
        guarded.file.write_text("[[allow")  # half written: the one of before stays
        with pytest.raises(PermissionDenied):
            await producer.send("orders", b"3")


class Asking(NamedTuple):
    """Two who ask one broker."""

    cluster: Client
    other: Client


@asynccontextmanager
async def asking_a_broker(directory: Path, guarded: Guarded, name: str) -> AsyncIterator[Asking]:
    """A client with the cluster's certificate, and one with another, who may ask for anything."""
    async with running_broker(directory, **guarded.settings) as (broker, cluster):
        connection = channel.connect(broker.server.address, guarded.tls(name))
        async with connection:
            yield Asking(cluster, Client(connection))


async def test_nobody_takes_the_place_of_a_timer_service(tmp_path, guarded):
    async with asking_a_broker(tmp_path / "b", guarded, "shop") as (cluster, shop):
        await cluster.send(batch("orders", [b"1"]))
        await claim_queues(cluster)
        for topic in ("payments", "orders"):  # may it send there or not
            with pytest.raises(PermissionDenied, match="shop may not be a part of the cluster"):
                await shop.send(batch(topic, [b"2"], producer_id=SERVICE_IDS_FROM, sequence=1))
        described = await cluster.admin.ListTopics(admin_pb2.ListTopicsRequest(system=True))
        assert not {each.name for each in described.topics} & {"payments", "%DLQ%%TIMER%"}
        [fired] = await cluster.send(
            batch("orders", [b"3"], producer_id=SERVICE_IDS_FROM, sequence=1)
        )
        assert not fired.duplicate


@pytest.mark.parametrize("name", ["shop", "nobody"])
async def test_a_cluster_whose_own_certificate_may_not_be_a_part_says_so_at_once(
    tmp_path, guarded, name, monkeypatch
):
    """And not after the time that it has to come up."""
    monkeypatch.setattr(readiness, "RPC_TIMEOUT_S", WAIT_S)
    async with running_cluster(tmp_path, **guarded.settings) as cluster:
        at = ChildPlace("nameserver-0", "nameserver", address=cluster.nameserver)
        lacking = [ChildPlace("broker-0", "broker", "broker-0")]

        async def missing(name: str) -> str:
            return await asyncio.to_thread(
                readiness.unregistered, at, lacking, attrgetter("address"), guarded.tls(name)
            )

        assert "broker-0 not registered" in await missing("cluster")
        with pytest.raises(ClusterFailed, match=f"{name} may not be a part of the cluster"):
            await missing(name)


async def test_what_falls_due_as_the_file_is_mended_is_no_dead_letter(tmp_path, guarded):
    async with running_broker(tmp_path / "b", **guarded.settings) as (broker, cluster):
        await cluster.send(batch("orders", [b"1"]))
        await claim_queues(cluster)
        permissions = broker.server._permissions
        assert permissions is not None
        mended = permissions.policy()
        looks = iter([parse(ALLOWED.replace('"cluster"', '"another"'))])
        permissions.policy = lambda: next(looks, mended)
        due = batch("orders", [b"2"], producer_id=SERVICE_IDS_FROM, sequence=1)
        with pytest.raises(PermissionDenied, match="cluster may not be a part of the cluster"):
            await cluster.send(due)
        [fired] = await cluster.send(due)
        assert not fired.duplicate
        described = await cluster.admin.ListTopics(admin_pb2.ListTopicsRequest(system=True))
        assert "%DLQ%%TIMER%" not in {each.name for each in described.topics}


async def test_who_may_not_see_a_topic_does_not_hear_how_much_it_holds(tmp_path, guarded):
    async with asking_a_broker(tmp_path / "b", guarded, "billing") as (cluster, billing):
        await cluster.send(batch("payments", [b"1", b"2"]))
        [pulled] = (await billing.pull("payments", group="billing")).queues
        commit = broker_pb2.OffsetCommit(topic="payments", queue_id=0, offset=1)
        request = broker_pb2.CommitOffsetsRequest(group="billing", commits=[commit])
        [committed] = (await billing.broker.CommitOffsets(request)).queues
        for answer in (pulled, committed):
            assert (
                answer.error.message == "permissions: billing may not receive from topic payments"
            )
            assert (answer.min_offset, answer.max_offset) == (0, 0)


async def test_a_queue_that_one_may_not_read_keeps_no_other_from_being_taken_over(
    tmp_path, guarded
):
    """A broker may have read the new file later than the one that took the member in."""
    async with asking_a_broker(tmp_path / "b", guarded, "billing") as (cluster, billing):
        await cluster.send(batch("orders", [b"1"]), batch("payments", [b"2"]))
        queues = [message_pb2.QueueRef(topic=name) for name in ("orders", "payments")]
        request = broker_pb2.AcquireQueuesRequest(group="billing", generation=1, queues=queues)
        orders, payments = (await billing.broker.AcquireQueues(request)).queues
        assert (orders.max_offset, orders.HasField("error")) == (1, False)
        assert payments.error.message == "permissions: billing may not receive from topic payments"
        assert (payments.min_offset, payments.max_offset) == (0, 0)


async def test_what_failed_of_a_topic_that_one_may_not_read_any_more_holds_up_no_other(
    tmp_path, guarded
):
    async with asking_a_broker(tmp_path / "b", guarded, "billing") as (cluster, billing):
        await cluster.send(batch("orders", [b"1"]), batch("payments", [b"2"]))
        failed = [broker_pb2.FailedMessage(topic=name) for name in ("payments", "orders")]
        request = broker_pb2.SendBackRequest(group="billing", messages=failed)
        payments, orders = (await billing.broker.SendBack(request)).results
        assert payments.error.message == "permissions: billing may not receive from topic payments"
        assert orders.due_ms
        assert not orders.HasField("error")


async def test_a_standing_pull_ends_with_the_group(tmp_path, guarded):
    async with asking_a_broker(tmp_path / "b", guarded, "billing") as (cluster, billing):
        await cluster.send(batch("orders", [b"1"]))
        queue = broker_pb2.QueuePull(topic="orders", queue_id=0)
        standing = broker_pb2.PullRequest(
            request_id=1, group="billing", queues=[queue], wait_ms=30_000, credit_records=65_536
        )
        stream = billing.broker.PullStream()
        await stream.write(standing)
        answer = await stream.read()
        assert [each.body for each in answer.queues[0].records.records] == [b"1"]
        guarded.file.write_text(ALLOWED.replace('groups = ["billing"]', ""))
        while answer.open:
            await cluster.send(batch("orders", [b"2"]))
            answer = await stream.read()
        assert "billing may not consume in group billing" in answer.queues[0].error.message


async def test_who_may_receive_begins_at_a_time(tmp_path, guarded):
    async with running_cluster(tmp_path, "b0", **guarded.settings) as cluster:
        async with guarded.producer(cluster, "shop") as producer:
            await producer.send("orders", b"1")
        mine = guarded.consumer_settings("billing")
        async with PullConsumer(nameserver=cluster.nameserver, settings=mine) as consumer:
            await consumer.assign("orders", start_from=datetime(2020, 1, 1, tzinfo=UTC))
            assert [message.body for message in await consumer.poll(timeout_s=60)] == [b"1"]


async def test_who_may_not_read_hears_it_from_the_start_also_without_membership(tmp_path, guarded):
    async with running_cluster(tmp_path, "b0", **guarded.settings) as cluster:
        async with guarded.producer(cluster, "shop") as producer:
            await producer.send("orders", b"1")
            await producer.send("orders-secret", b"2")
        mine = replace(guarded.consumer_settings("billing"), offsets_dir=str(tmp_path / "offsets"))
        consumer = PushConsumer(
            "billing",
            "orders-secret",
            print,
            nameserver=cluster.nameserver,
            settings=mine,
            broadcast=True,
        )
        with pytest.raises(PermissionDenied, match="may not receive from topic orders-secret"):
            await consumer.start()


async def test_a_producer_that_is_in_the_file_no_more_hears_it_at_once(tmp_path, guarded):
    async with (
        running_cluster(tmp_path, "b0", **guarded.settings) as cluster,
        guarded.producer(cluster, "shop") as producer,
    ):
        await producer.send("orders", b"1")
        guarded.file.write_text(ALLOWED.replace('"shop"', '"another"'))
        with pytest.raises(PermissionDenied, match="shop may not send to topic orders"):
            await repeated(lambda: producer.send("orders", b"2"))


async def test_a_pull_consumer_whose_stream_is_refused_says_so(tmp_path, guarded):
    async with running_cluster(tmp_path, "b0", **guarded.settings) as cluster:
        async with guarded.producer(cluster, "shop") as producer:
            await producer.send("orders", b"1")
        mine = guarded.consumer_settings("billing")
        async with PullConsumer("audit", nameserver=cluster.nameserver, settings=mine) as reader:
            await reader.assign("orders")
            with pytest.raises(PermissionDenied, match="billing may not consume in group audit"):
                await reader.poll(timeout_s=WAIT_S)
