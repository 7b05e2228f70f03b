"""A TCP link that a test can cut: everything to one address goes through it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.listening import listening


class Link:
    """Forwards connections to `target` (host:port) until it is cut."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.target = target
        self.delay_s = 0.0  # of each piece, each way
        self.opened = 0  # connections, ever
        self.sent = 0  # pieces that went there, ever
        self._there = asyncio.Event()
        self._back = asyncio.Event()
        self._there.set()
        self._back.set()
        self._refuses = False
        self._open: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Ends all connections and refuses new ones."""
        self._refuses = True
        for connection in self._open:
            connection.cancel()

    def swallow(self, *, there: bool = True, back: bool = True) -> None:
        """Connections stay, and new ones are accepted; nothing goes through any more: to the
        target, from it, or both."""
        if there:
            self._there.clear()
        if back:
            self._back.clear()

    def lose(self) -> None:
        """What is connected stays so, and nothing goes through it ever again; new connections are
        whole."""
        self.swallow()
        self._there, self._back = asyncio.Event(), asyncio.Event()
        self.heal()

    def heal(self) -> None:
        """Everything goes through again, also what was kept back."""
        self._refuses = False
        self.delay_s = 0.0
        self._there.set()
        self._back.set()

    async def ended(self) -> None:
        """Returns when all connections have ended."""
        await asyncio.gather(*self._open, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.opened += 1
        try:
            if not self._refuses:
                await self._there.wait()
                host, port = self.target.rsplit(":", 1)
                there = await asyncio.open_connection(host, int(port))
                try:
                    await asyncio.gather(
                        self._pump(reader, there[1], self._there),
                        self._pump(there[0], writer, self._back),
                    )
                finally:
                    there[1].transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._open.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event
    ) -> None:
        while data := await reader.read(65_536):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)  # what comes meanwhile goes with the next piece
            await passes.wait()
            self.sent += passes is self._there
            writer.write(data)
            await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def link_to(target: str) -> AsyncIterator[Link]:
    """A link that is whole at first."""
    link = Link(target)
    async with listening(link.serve) as link.address:
        try:
            yield link
        finally:
            link.heal()
            link.cut()
            await link.ended()
            await asyncio.sleep(0)  # their transports to the target close in the next turn
