"""What goes to a member of the cluster, or comes from it, is swallowed for a while, under load.

No connection breaks: the one side sends into the void, the other one hears nothing.  BLACK_HOLES
(by default 4) times, by CRASH_SEED, for a part of a second or for longer than anybody waits: what
clients, timer service and, where there are replicas, these exchange.  Producers send, at once and
delayed; two consumers receive.  Judged as test_kill9.py: nothing acknowledged is lost, stored
twice, early, or out of order.

`make prove-replicas` takes more.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from duemq.transport.channel import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS
from duemq_server.local_cluster import EmbeddedCluster
from duemq_server.local_cluster.supervisor import ChildPlace
from tests.cluster.harness import WAIT_S
from tests.cluster.judging import judged
from tests.service.cut_link import Link, link_to

HOLES = int(os.environ.get("BLACK_HOLES", "4"))
SEED = int(os.environ.get("CRASH_SEED", str(random.randrange(1 << 32))))
# Then peers have noticed, by their channels' keepalive.
LONG_S = (KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS) / 1000 + 3
SHORT_S_MAX = 2.0
WAYS = ({"back": False}, {"there": False}, {}, {"cut": True})

pytestmark = [pytest.mark.long, pytest.mark.timeout(240 + HOLES * 2 * LONG_S)]


class Links:
    """In front of members, in an event loop of their own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._links: dict[str, Link] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="links")
        self._thread.start()

    def address(self, name: str, target: str) -> str:
        """Where the member with this name, at `target`, is reached."""
        if name not in self._links:
            opening = self._stack.enter_async_context(link_to(target))
            self._links[name] = asyncio.run_coroutine_threadsafe(opening, self._loop).result()
        return self._links[name].address

    def disturb(self, name: str, way: dict[str, bool], seconds: float) -> None:
        """Swallows what goes through a member's link, or cuts it, and heals it."""
        link = self._links[name]
        disturb = link.cut if way.get("cut") else lambda: link.swallow(**way)
        self._loop.call_soon_threadsafe(disturb)
        time.sleep(seconds)
        self._loop.call_soon_threadsafe(link.heal)

    def names(self) -> list[str]:
        return list(self._links)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stack.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LinkedCluster(EmbeddedCluster):
    """Its brokers and timer services are reached through links."""

    def __init__(self, directory: Path, links: Links, **options: object) -> None:
        self._links = links
        super().__init__(directory, **options)  # type: ignore[arg-type]

    def _advertised(self, member: ChildPlace) -> str:
        if member.kind == "nameserver":
            return super()._advertised(member)
        return self._links.address(member.name, member.address)


@pytest.fixture(scope="module")
def links() -> Iterator[Links]:
    made = Links()
    yield made
    made.close()


@pytest.fixture(scope="module", params=[1, 3], ids=["alone", "replicas"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, links: Links
) -> Iterator[EmbeddedCluster]:
    replicas = request.param
    flags = ("--lease-duration", "1", "--min-insync", "2") if replicas > 1 else ()
    with LinkedCluster(
        tmp_path_factory.mktemp("cluster"),
        links,
        brokers=2 if replicas == 1 else 1,
        replicas=replicas,
        flags=dict.fromkeys(("broker", "timer"), flags),
    ) as embedded:
        yield embedded


def test_what_is_swallowed_on_the_way_is_neither_lost_nor_repeated(
    cluster: EmbeddedCluster, links: Links, tmp_path: Path
) -> None:
    print(f"CRASH_SEED={SEED}")
    randomness = random.Random(f"{SEED}-holes")
    names = [name for name in links.names() if name in cluster.processes]
    with judged(cluster, tmp_path, randomness, timeout_s=2 * WAIT_S):
        for number in range(HOLES):
            time.sleep(randomness.uniform(0.2, SHORT_S_MAX))
            name, way = randomness.choice(names), randomness.choice(WAYS)
            seconds = LONG_S if number % 4 == 1 else randomness.uniform(0.05, SHORT_S_MAX)
            print(f"{name} {way} for {seconds:.2f} s", flush=True)
            links.disturb(name, way, seconds)
