"""A nameserver and brokers in this process, on free ports, for one test's event loop."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tenacity

from duemq.administering import forgetting, probes, timer_shards
from duemq.administering.asking import SHOWN_WITHOUT_TIMEOUT_S, Asker
from duemq.protocol.route import RouteCache
from duemq.transport import cluster_client
from duemq.v1 import admin_pb2
from duemq_cli import session
from duemq_server.broker.process import Broker
from duemq_server.local_cluster.layout import bind_port
from duemq_server.nameserver.clock import SteadyClock
from duemq_server.nameserver.edge.servicer import OVERRIDES, SERVICE, NameserverServicer
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.settings import Settings as NameserverSettings
from duemq_server.serving import registration
from duemq_server.serving.server import Server
from duemq_server.timer_service.edge import broker_link, timer_names
from duemq_server.timer_service.edge.others import holds_of_others
from tests.service.running_broker import Client, batch, running_broker

HEARTBEAT_S = 0.5  # a heartbeat that takes longer is given up
WAIT_S = 60.0
POLL_S = 0.01
# A broker that is known to be away is asked for so long.
AWAY_S = 0.3


class Cluster:
    """Brokers that know one another through a nameserver."""

    def __init__(self, directory: Path, stack: AsyncExitStack, settings: dict[str, Any]) -> None:
        self.nameserver = ""
        self.registry: Registry
        self.brokers: dict[str, Broker] = {}
        self.clients: dict[str, Client] = {}
        self._lives: dict[str, AsyncExitStack] = {}
        self._directory = directory
        self._stack = stack
        self._settings = settings

    async def start_nameserver(self) -> None:
        clock = SteadyClock()
        self.registry = registry = Registry(clock.now_ms(), expiry_ms=30_000)
        shared = [name for name in self._settings if name.startswith(("tls_", "permissions"))]
        tls = {name: self._settings[name] for name in shared}
        settings = NameserverSettings(
            listen="127.0.0.1:0", ready_after=0.0, drain_timeout=0.0, **tls
        )
        server = Server(settings)
        servicer = NameserverServicer(registry, clock.now_ms, settings.watchers_max, server.unsent)
        server.add(SERVICE, servicer, OVERRIDES)
        await server.start(announced=False)
        self._stack.push_async_callback(server.stop)
        self._stack.callback(servicer.close)
        self.nameserver = server.address

    async def start_broker(self, name: str, nameservers: Sequence[str] = ()) -> None:
        """Starts a broker, anew or where it was; returns when everybody knows it.

        `nameservers`: where others than the cluster's one are to be told and asked.
        """
        # Also once it is silent: a server of another test would be asked in its place.
        held = bind_port(0)
        self._stack.callback(held.close)
        life = self._lives[name] = AsyncExitStack()
        self._stack.push_async_exit(life)
        self.brokers[name], self.clients[name] = await life.enter_async_context(
            running_broker(
                self._directory / name,
                name=name,
                listen=f"127.0.0.1:{held.getsockname()[1]}",
                nameservers=tuple(nameservers) or (self.nameserver,),
                **{"heartbeat_period": HEARTBEAT_S, "drain_timeout": 0.1, **self._settings},
            )
        )
        await until(lambda: all(len(cache.brokers) == len(self.brokers) for cache in self._caches))

    @property
    def _caches(self) -> list[RouteCache]:
        return [broker._routes.cache for broker in self.brokers.values()]

    async def stop_broker(self, name: str) -> None:
        """A clean stop: the broker leaves the nameserver."""
        await self._lives[name].aclose()
        del self.brokers[name], self.clients[name]

    async def silence_broker(self, name: str) -> None:
        """It takes no connection any more; the nameserver still lists it, and hears from it."""
        await self.brokers[name].server._server.stop(0)

    async def create_topic(self, topic: str, queues: int = 4) -> None:
        config = admin_pb2.TopicConfig(name=topic, queues=queues)
        for client in self.clients.values():
            await client.admin.CreateTopic(
                admin_pb2.CreateTopicRequest(topic=config, if_missing=True)
            )
        await until(lambda: all(self._serves(cache, topic) for cache in self._caches))

    def _serves(self, cache: RouteCache, topic: str) -> bool:
        route = cache.route(topic)
        return route is not None and len(route.brokers) == len(self.brokers)

    async def shown(self) -> None:
        """Returns when all fires that are stored may be seen: a few milliseconds later."""
        await until(lambda: not any(len(each.store.hidden) for each in self.brokers.values()))

    async def send(self, topic: str, bodies: list[bytes], *, broker: str = "b0", **fields) -> int:
        """Stores a batch in one queue; answers its first offset."""
        [result] = await self.clients[broker].send(batch(topic, bodies, **fields))
        return result.base_offset


@asynccontextmanager
async def running_cluster(
    directory: Path, *brokers: str, **settings: Any
) -> AsyncIterator[Cluster]:
    """`settings` are those of the brokers."""
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # A claim that is given up counts as a look round for a shard (`running_shard`).
        patch.setattr(broker_link, "CLAIM_TIMEOUT_S", WAIT_S)
        # What is given up is never said again, and this nameserver waits for nobody's heartbeat.
        patch.setattr(registration, "DEREGISTER_TIMEOUT_S", WAIT_S)
        patch.setattr(registration, "CHECK_TIMEOUT_S", WAIT_S)
        await_answers(patch)
        cluster = Cluster(directory, stack, settings)
        await cluster.start_nameserver()
        for name in brokers:
            await cluster.start_broker(name)
        yield cluster


def await_answers(patch: pytest.MonkeyPatch) -> None:
    """Else who answers late is shown as away; whoever is away here refuses connections, at once."""
    for asking in (forgetting, probes, timer_shards, timer_names, holds_of_others):
        patch.setattr(asking, "TIMEOUT_S", WAIT_S)
    patch.setattr(session, "CONNECT_TIMEOUT_S", WAIT_S)
    call = cluster_client.Client.call

    # Methods have that as their arguments' default, where no patch reaches it.
    async def called(client: Any, address: Any, method: Any, timeout_s: float | None = None) -> Any:
        patient_s = WAIT_S if timeout_s == SHOWN_WITHOUT_TIMEOUT_S else timeout_s
        return await call(client, address, method, patient_s)

    patch.setattr(cluster_client.Client, "call", called)


def no_log_ends_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a nameserver that has just started: a broker with an older copy hears nothing there."""
    monkeypatch.setattr(Registry, "log_end", lambda registry, store_id: 0)


def soon_given_up(monkeypatch: pytest.MonkeyPatch, away: str) -> None:
    """Questions of admin clients to this broker end soon; others may take as long as they need."""
    at = Asker.at

    async def asked(self: Asker, broker: str, method: Any, timeout_s: float | None = None) -> Any:
        return await at(self, broker, method, AWAY_S if broker == away else WAIT_S)

    monkeypatch.setattr(Asker, "at", asked)


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Waits for what must come true; fails the test when it does not."""

    async def holds() -> bool:
        outcome = condition()
        return outcome if isinstance(outcome, bool) else await outcome

    retry = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_delay(WAIT_S),
        wait=tenacity.wait_fixed(POLL_S),
        retry=tenacity.retry_if_result(lambda fulfilled: not fulfilled),
        retry_error_callback=lambda state: False,
    )
    assert await retry(holds), f"not fulfilled within {WAIT_S:g} s"
