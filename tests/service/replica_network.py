"""What lies between the replicas of a group, and between each and the store: all of it breaks.

    async with network(monkeypatch, group) as net:      # before group.start()
        net.link("a", "b").swallow(back=False)          # what a sends to b waits
        net.stores["a"].away = True

A replica connects as follower to whoever leads; `link(x, y)` is what x opens to y.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest

from duemq.transport import channel
from duemq_server.replication.running import process, record_store
from duemq_server.replication.stores.store import StoreError
from tests.service.cut_link import Link, link_to
from tests.service.replica_group import WHO, Group, Member

FAST = {"lease_duration": 1.0, "lag_max": 0.5}
"""Settings of a group whose leader may change at once."""
LASTING_S = 30.0
"""Lease of a leader that is to stay one, however busy the machine is, until it hands over."""


class HostileStore:
    """A replica's way to the store.

    `away`: nothing gets there.  `deaf`: it does, and no answer comes.  `late_s`: a swap is done so
    long after its caller has given it up.
    """

    def __init__(self, store) -> None:
        self._store = store
        self.look_s = store.look_s
        self._late: list[threading.Timer] = []
        self.away = self.deaf = False
        self.late_s = 0.0

    def heal(self) -> None:
        self.away = self.deaf = False
        self.late_s = 0.0

    def _pass(self, call, *arguments):
        if self.away:
            raise StoreError("cut off")
        answer = call(*arguments)
        if self.deaf:
            raise StoreError("no answer")
        return answer

    def read(self):
        return self._pass(self._store.read)

    def swap(self, version, record):
        if self.late_s:
            timer = threading.Timer(self.late_s, self._swap_late, (version, record))
            self._late.append(timer)
            timer.start()
            raise StoreError("no answer in time")
        return self._pass(self._store.swap, version, record)

    def _swap_late(self, version, record) -> None:
        try:
            self._store.swap(version, record)
        except Exception:
            return  # somebody was faster: nobody waits for it

    def renew(self, leader):
        return self._pass(self._store.renew, leader)

    def release(self, leader):
        return self._pass(self._store.release, leader)

    def close(self) -> None:
        for timer in self._late:
            timer.join()
        self._store.close()


class Network:
    """See the module."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], Link] = {}
        self.stores: dict[str, HostileStore] = {}

    def link(self, source: str, target: str) -> Link:
        return self._links[source, target]

    def isolate(self, name: str, *, there: bool = True, back: bool = True) -> None:
        """Others hear nothing of it (`there`), it nothing of them (`back`), in both roles."""
        for (source, target), link in self._links.items():
            if source == name:
                link.swallow(there=there, back=back)
            elif target == name:
                link.swallow(there=back, back=there)

    def heal(self) -> None:
        for link in self._links.values():
            link.heal()
        for store in self.stores.values():
            store.heal()


@asynccontextmanager
async def network(monkeypatch: pytest.MonkeyPatch, group: Group) -> AsyncIterator[Network]:
    net = Network()
    connect, open_store = channel.connect, record_store.open_store
    async with AsyncExitStack() as stack:
        addresses = {each.settings.listen: name for name, each in group.members.items()}
        for source, target in permutations(group.members, 2):
            link = await stack.enter_async_context(link_to(group.members[target].settings.listen))
            net._links[source, target] = link

        def connect_as(address: str, _tls: object = None):
            link = net._links.get((WHO.get(""), addresses.get(address, "")))
            return connect(link.address if link is not None else address)

        def open_as(settings):
            store = HostileStore(open_store(settings))
            before = net.stores.get(settings.replica)
            if before is not None:  # a new process is no nearer to the store
                store.away, store.deaf, store.late_s = before.away, before.deaf, before.late_s
            net.stores[settings.replica] = store
            return store

        monkeypatch.setattr(channel, "connect", connect_as)
        monkeypatch.setattr(process, "open_store", open_as)
        yield net


@asynccontextmanager
async def running_group(
    monkeypatch: pytest.MonkeyPatch, directory: Path, count: int, **settings
) -> AsyncIterator[tuple[Group, Network, Member]]:
    """A group, what lies between its replicas, and who leads: all are in sync."""
    group = Group(directory, count, **{**FAST, **settings})
    async with network(monkeypatch, group) as net:
        group.start()
        try:
            yield group, net, await group.in_sync(count)
        finally:
            net.heal()
            await group.stop()


@pytest.fixture
def running(monkeypatch, tmp_path):
    """See running_group."""
    return partial(running_group, monkeypatch, tmp_path)


def others_of(group: Group, leader: Member) -> list[Member]:
    return [each for each in group.members.values() if each is not leader]
