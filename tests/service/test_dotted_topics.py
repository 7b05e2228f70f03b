"""Topics with dots in their names, from the producer to the disk and back."""

from duemq import aio
from duemq.testing import MemoryCluster
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.tools.check import check
from tests.service.running_cluster import running_cluster, until

NAMES = ["orders.eu.v2", "orders.eu", "orders", ".hidden", "orders."]


async def test_a_topic_with_dots_survives_a_restart(tmp_path):
    async with running_cluster(tmp_path, "b0") as cluster:
        async with aio.Producer(cluster.nameserver) as producer:
            for name in NAMES:
                await producer.send(name, name.encode(), key="k")
                await producer.send(name, b"later", delay="1h")
        await cluster.stop_broker("b0")
        await cluster.start_broker("b0")
        async with aio.PullConsumer(nameserver=cluster.nameserver) as consumer:
            for name in NAMES:
                await consumer.assign(name, start_from="earliest")
                messages = []
                while not messages:
                    messages = await consumer.poll(1.0)
                assert [each.body for each in messages] == [name.encode()]
        async with aio.Admin(cluster.nameserver) as admin:
            assert sorted(each.name for each in await admin.topics()) == sorted(NAMES)
            await admin.delete_topic("orders.eu")
            await until(lambda: "orders.eu" not in cluster.brokers["b0"].store.topics)
        await cluster.stop_broker("b0")
    findings = list(check(str(tmp_path / "b0"), RealDisk()))
    assert not [each for each in findings if each.damage]


def test_the_twin_takes_dots_too():
    cluster = MemoryCluster()
    assert cluster.producer().send("orders.eu.v2", b"x").topic == "orders.eu.v2"
