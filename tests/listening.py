"""A server of TCP connections that leaves none behind; where this machine reaches itself."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
# From a connection that the kernel has accepted to its transport.
TURNS = 3


def loopbacks() -> Iterator[str]:
    """As clients take them: some machines and containers have no IPv6."""
    yield "127.0.0.1"
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        yield "[::1]"


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[str]:
    """HOST:PORT of a server on a free port.

    At its end all connections are closed, also one that came just then, of which `serve` has not
    heard: a transport that is forgotten warns in whatever test runs when it is collected.
    """
    writers: set[asyncio.StreamWriter] = set()

    async def kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        await serve(reader, writer)

    server = await asyncio.start_server(kept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        loop = asyncio.get_running_loop()
        for each in server.sockets:
            loop.remove_reader(each.fileno())
        # After `close` no transport can be made for what was accepted: it would be forgotten.
        for _ in range(TURNS):
            await asyncio.sleep(0)
        server.close()
        while server._active_count:  # type: ignore[attr-defined]  # transports that are not closed
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0)
