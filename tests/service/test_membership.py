"""A member whose stream never begins joins again: against a coordinator that is played here."""

import asyncio

import grpc.aio
import pytest

from duemq.consumer.fetching.subscription import ALL
from duemq.consumer.group.membership import Membership
from duemq.v1 import group_pb2
from tests.service.playing import PINGS, play
from tests.service.running_cluster import until
from tests.service.test_lease import QUEUES, Holder, PlayedClient, PlayedCoordinator


class SilentStream:
    """As a call of gRPC's whose channel was closed while it began: nothing ever returns."""

    async def write(self, request: group_pb2.MemberEvent) -> None:
        await asyncio.Event().wait()

    async def read(self) -> object:
        await asyncio.Event().wait()
        raise AssertionError("it is silent")

    def cancel(self) -> None: ...


async def test_a_stream_that_never_begins_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    server, coordinator = grpc.aio.server(options=PINGS), PlayedCoordinator()
    play(coordinator, server, group_pb2.DESCRIPTOR)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client, holder, silent = PlayedClient(address), Holder(), [SilentStream()]
    join = Membership._join

    def joined(membership: Membership, name: str) -> object:
        return silent.pop() if silent else join(membership, name)

    monkeypatch.setattr(Membership, "_join", joined)
    membership = Membership(
        client,
        holder,
        None,
        group="billing",
        subscriptions={"orders": ALL},
        session_timeout_s=1.0,
        strategy="",
    )
    running = asyncio.create_task(membership.run())
    try:
        await until(lambda: holder.held == frozenset(QUEUES))
        assert not silent
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.connection.close()
        await server.stop(None)
