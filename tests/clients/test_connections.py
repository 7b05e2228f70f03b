"""Connections that break, with or without a word, and programs made of protos/ that go on."""

import asyncio
import json
import os
from contextlib import asynccontextmanager, suppress

import pytest

from duemq import Admin, Producer
from duemq.errors import GroupNotFound
from tests.clients.played import redirected
from tests.clients.programs import CONSUMERS, RUN_S_MAX, command_of
from tests.cluster.harness import until
from tests.service.cut_link import link_to

pytestmark = [pytest.mark.toolchain, pytest.mark.cluster, pytest.mark.long]
# Without limits of its own gRPC waits ever longer between attempts: it makes ten in WAIT_S.
ATTEMPTS = 20


@asynccontextmanager
async def consuming(language, cluster, stubs, topic, count):
    """A consumer that has consumed a message, of `count`; and the link to its broker."""
    command = command_of(language, CONSUMERS)
    broker = cluster.names("broker")[0]
    with Admin(cluster.nameserver) as admin:
        admin.create_topic(topic, queues=1, brokers=[broker])
    send(cluster, topic, b"one")
    async with link_to(cluster.address(broker)) as link:
        with redirected(cluster, link.address) as nameserver:
            program = await asyncio.create_subprocess_exec(
                *(*command, nameserver, topic, topic, str(count)),
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(stubs)},
            )
            try:
                await asyncio.to_thread(until, lambda: committed(cluster, topic) == [1])
                yield program, link
            finally:
                with suppress(ProcessLookupError):
                    program.kill()
                await program.communicate()


def send(cluster, topic, body):
    with Producer(cluster.nameserver) as producer:
        producer.send(topic, body)


def committed(cluster, group):
    with Admin(cluster.nameserver) as admin, suppress(GroupNotFound):
        return [each.offset for each in admin.describe_group(group).progress]
    return []


async def consumed(program):
    async with asyncio.timeout(RUN_S_MAX):
        output, _ = await program.communicate()
    assert program.returncode == 0
    return [json.loads(line)["body"] for line in output.splitlines()]


@pytest.mark.parametrize("language", CONSUMERS)
async def test_a_generated_consumer_notices_a_connection_that_died_in_silence(
    language, cluster, stubs
):
    topic = f"silent-{language}"
    async with consuming(language, cluster, stubs, topic, 2) as (program, link):
        link.lose()
        await asyncio.to_thread(send, cluster, topic, b"two")
        assert await consumed(program) == ["one", "two"]


@pytest.mark.parametrize("language", CONSUMERS)
async def test_a_generated_consumer_is_back_soon_after_an_outage(language, cluster, stubs):
    topic = f"outage-{language}"
    async with consuming(language, cluster, stubs, topic, 2) as (program, link):
        link.cut()
        before = link.opened
        await asyncio.to_thread(until, lambda: link.opened >= before + ATTEMPTS)
        link.heal()
        await asyncio.to_thread(send, cluster, topic, b"two")
        assert await consumed(program) == ["one", "two"]
