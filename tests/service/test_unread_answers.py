"""Clients that do not read: what is held for them is bounded, and they are cut off."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import generate_latest

from duemq.errors import Overloaded
from duemq.transport import status
from duemq.v1 import broker_pb2, message_admin_pb2, stubs
from duemq_server.broker.process import Broker
from duemq_server.serving import server
from duemq_server.serving.unsent import CONNECTION_PART, SMALL_BYTES
from tests.service.running_broker import Client, batch, running_broker, topic_name
from tests.service.running_cluster import until

BUDGET = 8 << 20
OF_CONNECTION = BUDGET // CONNECTION_PART
# Else gRPC's client itself takes some MiB that nobody reads.
NO_READ_AHEAD = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
BODY = b"x" * (OF_CONNECTION // 4)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Broker, Client]]:
    async with running_broker(
        tmp_path, unsent_bytes_max=BUDGET, unread_timeout=300.0, drain_timeout=0.0
    ) as made:
        yield made


@pytest.fixture
async def topic(pair: tuple[Broker, Client]) -> str:
    name = topic_name()
    for _ in range(4):
        await pair[1].send(batch(name, [BODY]))
    return name


class Caller:
    """A call whose answer is on its way for as long as the test likes."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.done: list[Callable[[Any], None]] = []

    def peer(self) -> str:
        return self._peer

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None:
        self.done.append(callback)


async def test_unary_pulls_wait_until_answers_before_them_are_read(
    pair: tuple[Broker, Client], topic: str
) -> None:
    broker, _ = pair
    unsent = broker.server.unsent
    request = broker_pb2.PullRequest(
        queues=[broker_pb2.QueuePull(topic=topic)], max_bytes=OF_CONNECTION
    )
    callers = [Caller("unread") for _ in range(20)]
    pulls = [asyncio.create_task(broker._pulls.pull(request, each)) for each in callers]
    await until(lambda: unsent.waiting == 19)
    assert len(await pulls[0]) > 3 * len(BODY)
    assert unsent.held <= OF_CONNECTION + 4096
    [given_back] = callers[0].done
    given_back(None)
    await until(lambda: unsent.waiting == 18)
    for pull in pulls:
        pull.cancel()
    await asyncio.gather(*pulls, return_exceptions=True)
    for caller in callers:
        for done in caller.done:
            done(None)
    assert unsent.held == 0


async def test_fetched_frames_wait_their_turn_too(pair: tuple[Broker, Client], topic: str) -> None:
    broker, _ = pair
    unsent = broker.server.unsent
    request = broker_pb2.FetchFramesRequest(topic=topic, max_bytes=OF_CONNECTION)
    caller = Caller("unread")
    await broker._pulls.fetch(request, caller)
    second = asyncio.create_task(broker._pulls.fetch(request, caller))
    await until(lambda: unsent.waiting == 1)
    caller.done[0](None)
    assert broker_pb2.FetchFramesResponse.FromString(await second).frames


async def test_an_unread_stream_holds_little_and_is_cut_off(
    pair: tuple[Broker, Client], topic: str
) -> None:
    broker, client = pair
    unsent = broker.server.unsent
    async with grpc.aio.insecure_channel(
        broker.server.address, options=NO_READ_AHEAD
    ) as connection:
        stub = stubs.BrokerStub(connection)
        calls = [stub.PullStream() for _ in range(20)]
        for call in calls:
            for number in (1, 2):
                await call.write(
                    broker_pb2.PullRequest(
                        request_id=number, queues=[broker_pb2.QueuePull(topic=topic)]
                    )
                )
        await until(lambda: unsent.waiting > 0)
        assert unsent.held <= unsent.peak <= OF_CONNECTION + 4096
        # Who reads is served meanwhile.
        assert await client.bodies(topic) == [BODY] * 4
        # Nobody else has an answer under way: the time of this connection is over now.
        unsent.timeout_s = 0.001
        codes = {await call.code() for call in calls}
        assert grpc.StatusCode.UNAVAILABLE in codes
        assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
    await until(lambda: not unsent.held and not unsent.waiting)
    await until(lambda: b"duemq_rpc_cut_connections_total 1.0" in page(broker))


def page(broker: Broker) -> bytes:
    return generate_latest(broker.server.registry)


async def test_an_answer_for_which_there_is_no_room_is_refused(
    pair: tuple[Broker, Client], topic: str
) -> None:
    broker, client = pair
    held = [broker.server.unsent.take_now(f"c{n}", OF_CONNECTION) for n in range(CONNECTION_PART)]
    request = message_admin_pb2.FindMessagesRequest(topic=topic, queue_id=0)
    with pytest.raises(Overloaded) as refused:
        await status.answer(client.message_admin.FindMessages(request))
    assert refused.value.field == "unsent_bytes_max"
    assert b"duemq_rpc_refused_answers_total 1.0" in page(broker)
    assert (await client.send(batch(topic, [b"small"])))[0].base_offset == 4
    for share in held:
        share.give_back()
    assert (await status.answer(client.message_admin.FindMessages(request))).messages


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")],
    ids=["files", "threads"],
)
async def test_who_could_not_be_cut_off_is_at_the_next_look(
    error: Exception,
    pair: tuple[Broker, Client],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []

    def shut(peer: str) -> bool:
        asked.append(peer)
        if len(asked) < 3:
            raise error
        return True

    monkeypatch.setattr(server.connections, "shut", shut)
    monkeypatch.setattr(server, "UNSENT_CHECK_S", 0.01)
    unsent = pair[0].server.unsent
    unsent.timeout_s = 0.0
    share = unsent.take_now("unread", SMALL_BYTES + 1)
    await until(lambda: len(asked) > 2)
    share.give_back()
    assert caplog.text.count(str(error)) == 1
