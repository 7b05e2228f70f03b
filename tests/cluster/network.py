"""The network between the processes of a cluster, and a test's own: links that break.

    with ProxiedCluster(directory, network, brokers=1, replicas=3) as cluster:
        with network.silent(("broker-0/b", "broker-0/a")):  # a hears nothing of b
        with network.silent(*between(CLIENT, "broker-0/a")):
        with network.delayed(0.1, ("broker-0/b", "broker-0/a")):

Every member advertises a proxy, so all that others connect to goes through it.  Who connects is
told by the kernel's table of sockets: a pair of processes has a link of its own.  A link that
breaks closes nothing: connections freeze, new ones are accepted and say nothing, and what was kept
back comes when it heals, as it does when packets were lost.  What replicas share beside that, the
directory of leases, stays.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from duemq_server.local_cluster import EmbeddedCluster
from duemq_server.local_cluster.supervisor import ChildPlace
from tests.listening import listening
from tests.service.cut_link import Link

CLIENT = "client"
"""The test's process."""
OTHER = "other"
"""Commands that it runs, and what cannot be told; nobody breaks their links."""
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
NAMESERVERS = "--nameservers"

Pair = tuple[str, str]
"""Who sends, and to whom; of a link: who connects."""


def between(one: str, *others: str) -> list[Pair]:
    """All that passes between `one` and the others."""
    return both_ways((one, other) for other in others)


def both_ways(pairs: Iterable[Pair]) -> list[Pair]:
    """And the other way round."""
    return [each for a, b in pairs for each in ((a, b), (b, a))]


class Network:
    """Owns the proxies, in an event loop of its own thread.  Methods are for other threads."""

    def __init__(self) -> None:
        self.processes: Callable[[], Mapping[str, int]] = dict
        """Names and pids of those who connect."""
        self._links: dict[Pair, Link] = {}
        self._fronts: dict[str, str] = {}
        self._stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network")
        self._thread.start()

    def front(self, name: str, target: str) -> str:
        """The address by which others reach who listens at `target`."""
        if name not in self._fronts:
            self._fronts[name] = self._run(self._open(name, target))
        return self._fronts[name]

    @contextmanager
    def silent(self, *pairs: Pair) -> Iterator[None]:
        """Nothing that the first of a pair says reaches the other, whoever connected to whom."""
        for source, target in pairs:
            self._do(lambda link: link.swallow(back=False), (source, target))
            self._do(lambda link: link.swallow(there=False), (target, source))
        with self._healed(pairs):
            yield

    @contextmanager
    def delayed(self, delay_s: float, *pairs: Pair) -> Iterator[None]:
        """What passes between them comes so much later, each way."""

        def delay(link: Link) -> None:
            link.delay_s = delay_s

        for pair in both_ways(pairs):
            self._do(delay, pair)
        with self._healed(pairs):
            yield

    @contextmanager
    def _healed(self, pairs: Iterable[Pair]) -> Iterator[None]:
        try:
            yield
        finally:
            for pair in both_ways(pairs):
                self._do(Link.heal, pair)

    def passed(self, pair: Pair) -> int:
        """Pieces that went there, ever: whether a link is one that is used."""
        link = self._links.get(pair)
        return link.sent if link is not None else 0

    def close(self) -> None:
        """Ends all connections, and the thread."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _do(self, what: Callable[[Link], None], pair: Pair) -> None:
        async def do() -> None:
            what(self._link(pair))

        self._run(do())

    def _link(self, pair: Pair) -> Link:
        if pair not in self._links:
            self._links[pair] = Link("")
        return self._links[pair]

    async def _open(self, name: str, target: str) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # In a thread: the table has all sockets of the machine, and others wait here.
            link = self._link((await asyncio.to_thread(self._who, writer), name))
            link.target = target
            await link.serve(reader, writer)

        return await self._stack.enter_async_context(listening(serve))

    def _who(self, writer: asyncio.StreamWriter) -> str:
        ports = writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1]
        inode = socket_of(*ports)
        known = {CLIENT: os.getpid(), **self.processes()}
        return next((name for name, pid in known.items() if inode in sockets_of(pid)), OTHER)

    async def _close(self) -> None:
        await self._stack.aclose()
        for link in self._links.values():
            link.heal()
            link.cut()
        await asyncio.gather(*(link.ended() for link in self._links.values()))
        await asyncio.sleep(0)  # their transports to the target close in the next turn of the loop


def socket_of(local: int, remote: int) -> str:
    """The kernel's number of a connection's socket, by its ports; empty: it is gone."""
    wanted = f":{local:04X}", f":{remote:04X}"
    for table in TABLES:
        for line in table.read_text().splitlines()[1:]:
            if wanted[0] not in line:
                continue
            fields = line.split()
            if fields[1].endswith(wanted[0]) and fields[2].endswith(wanted[1]):
                return fields[9]
    return ""


def sockets_of(pid: int) -> set[str]:
    """The kernel's numbers of a process' sockets."""
    found = set()
    with suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was closed
                found.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    return found


class ProxiedCluster(EmbeddedCluster):
    """Its members are reached, also by each other, through a network."""

    def __init__(self, directory: Path, network: Network, **options: Any) -> None:
        super().__init__(directory, **options)
        self._network = network
        network.processes = lambda: self.processes

    def _advertised(self, member: ChildPlace) -> str:
        return self._network.front(member.name, member.address)

    def _command(self, member: ChildPlace) -> list[str]:
        command = super()._command(member)
        if NAMESERVERS in command:
            command[command.index(NAMESERVERS) + 1] = self.nameserver
        return command
