"""Which channels and watches a client closes, and when; what it does when callers give up."""

from __future__ import annotations

import asyncio
import gc
from typing import ClassVar

import pytest

from duemq.errors import PermissionDenied, Unavailable
from duemq.protocol.route import Broker, TimerShard, Update
from duemq.settings import ClientSettings
from duemq.transport import channel, cluster_client
from duemq.transport.cluster_client import Client
from duemq.transport.routing.diagnosis import Diagnosis

SOON = ClientSettings(connect_timeout_s=0.1)


class Channel:
    """Notes that it was closed."""

    def __init__(self, address: str, _tls: object) -> None:
        self.address = address
        self.closed = False

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(channel, "connect", Channel)
    return Client("127.0.0.1:1")


def tell(client: Client, brokers: dict[str, str], timers: dict[str, str] | None = None) -> None:
    """What a nameserver pushes."""
    update = Update(
        True,
        brokers=tuple(Broker(name, address) for name, address in brokers.items()),
        timers=tuple(TimerShard(name, at, 0, 1) for name, at in (timers or {}).items()),
    )
    assert client._routes.apply(update)
    client._routes_changed()


async def test_a_channel_to_where_a_broker_was_is_closed(client: Client) -> None:
    tell(client, {"b": "old:1", "c": "other:1"})
    left, stays = client.channel("old:1"), client.channel("other:1")
    tell(client, {"b": "new:1", "c": "other:1"})
    await asyncio.gather(*client._channels._closing)
    assert left.closed
    assert not stays.closed
    assert client.channel("old:1") is not left  # it is asked again: a connection of its own
    assert client.channel("other:1") is stays


async def test_a_channel_to_where_a_timer_shard_was_is_closed(client: Client) -> None:
    tell(client, {}, {"t": "old:1"})
    left = client.channel("old:1")
    tell(client, {}, {"t": "new:1"})
    await asyncio.gather(*client._channels._closing)
    assert left.closed


async def test_who_is_away_and_comes_back_elsewhere_has_moved(client: Client) -> None:
    tell(client, {"b": "old:1"})
    left = client.channel("old:1")
    tell(client, {})
    assert not client._channels._closing  # it may come back where it was
    tell(client, {"b": "new:1"})
    await asyncio.gather(*client._channels._closing)
    assert left.closed


async def test_an_address_that_another_one_took_over_keeps_its_channel(client: Client) -> None:
    tell(client, {"b": "one:1", "c": "two:1"})
    first, second = client.channel("one:1"), client.channel("two:1")
    tell(client, {"b": "two:1", "c": "one:1"})
    assert not client._channels._closing
    assert not first.closed
    assert not second.closed


class Watcher:
    """Waits for routes that never come; to stop takes a while."""

    made: asyncio.Queue[Watcher]

    def __init__(self, *_: object, **__: object) -> None:
        self.made.put_nowait(self)
        self.asked, self.stopping, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_change(self, listener: object) -> None:
        pass

    def start(self) -> None:
        pass

    async def ready(self, timeout_s: float) -> None:
        self.asked.set()
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stopping.set()
        await self.go_on.wait()


class Denied(Watcher):
    """One nameserver lets this client see nothing; another one is away."""

    denied: ClassVar[dict[str, PermissionDenied]] = {"a:1": PermissionDenied("me may not do it")}
    waited: ClassVar[asyncio.Event]

    def __init__(self, *_: object, **__: object) -> None:
        """Begins nothing."""

    async def ready(self, timeout_s: float) -> None:
        await self.waited.wait()
        raise Unavailable("no nameserver answered")

    async def stop(self) -> None:
        pass


async def test_who_is_let_see_nothing_hears_so_also_where_a_nameserver_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Denied.waited = asyncio.Event()
    looks: list[str] = []

    async def diagnose(address: str, _: object) -> Diagnosis:
        if address in looks:  # what was found before is known
            Denied.waited.set()
        looks.append(address)
        return Diagnosis(f"{address} is not ready yet")

    monkeypatch.setattr(cluster_client, "RouteWatcher", Denied)
    monkeypatch.setattr(cluster_client, "diagnose", diagnose)
    with pytest.raises(Unavailable, match="me may not do it; b:1 is not ready yet"):
        await Client("a:1,b:1", SOON).start()
    Denied.waited.clear()
    monkeypatch.setitem(Denied.denied, "b:1", PermissionDenied("nor that"))
    with pytest.raises(PermissionDenied, match="me may not do it"):
        await Client("a:1,b:1", SOON).start()


async def test_a_start_that_is_given_up_while_another_one_s_watch_ends_leaves_none(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Watcher.made = asyncio.Queue()
    monkeypatch.setattr(cluster_client, "RouteWatcher", Watcher)
    first = asyncio.create_task(client.start())
    one = await made.get()
    await one.asked.wait()
    first.cancel()
    await one.stopping.wait()
    second = asyncio.create_task(client.start())
    other = await made.get()
    await other.asked.wait()
    second.cancel()
    one.go_on.set()
    other.go_on.set()
    await asyncio.gather(first, second, return_exceptions=True)
    assert other.stopping.is_set()


async def test_a_topic_that_cannot_be_made_is_no_lost_error_where_all_callers_have_given_up(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, told = asyncio.Event(), asyncio.Event(), []

    async def create(topic: str, timeout_s: float) -> frozenset[str]:
        began.set()
        await go_on.wait()
        raise Unavailable("no broker")

    monkeypatch.setattr(client, "_create", create)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    asking = asyncio.create_task(client.topic_route("new", create=True))
    await began.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    del asking  # which holds it
    go_on.set()
    await asyncio.wait(client._creating.values())
    gc.collect()
    assert not told
