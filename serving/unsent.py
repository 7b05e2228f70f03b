"""Bytes of answers that clients have not taken: bounded for each connection and in all.

gRPC holds a whole answer (twice) until the client has read it.  So whoever answers takes a share of
the budget before it makes an answer that may be large, and gives it back when the answer is gone.
Who reads takes turns; who does not read fills only the share of a connection, and is cut off.

Owned by: the event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from duemq.errors import Overloaded

# Answers up to this size are not counted: the call that they belong to costs more.
SMALL_BYTES = 4 << 10
# A connection may hold this part of the budget.
CONNECTION_PART = 8
# Those who wait for room.
WAITING_MAX = 10_000


class BudgetShare:
    """What one answer takes of the budget, until `give_back`."""

    __slots__ = ("_connection", "_unsent", "since", "size")

    def __init__(self, unsent: "Unsent", connection: "_Connection", size: int) -> None:
        self._unsent = unsent
        self._connection = connection
        self.size = 0
        connection.shares[self] = None
        self.resize(size)

    def resize(self, size: int) -> None:
        """The answer has turned out to be of this size, and is on its way now."""
        self.since = self._unsent.clock()
        self._unsent._add(self._connection, size - self.size)
        self.size = size

    def give_back(self) -> None:
        """The answer is gone.  A second time does nothing."""
        if self._connection.shares.pop(self, self) is None:
            self._unsent._add(self._connection, -self.size)


class _Connection:
    __slots__ = ("held", "peer", "shares", "waiting")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.held = 0
        self.shares: dict[BudgetShare, None] = {}  # the oldest first
        self.waiting: deque[tuple[int, asyncio.Future[BudgetShare]]] = deque()


class Unsent:
    """The budget of one server."""

    def __init__(
        self,
        bytes_max: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`timeout_s`: how long a client may take to read an answer."""
        self.bytes_max = bytes_max
        self.connection_bytes_max = bytes_max // CONNECTION_PART
        self.timeout_s = timeout_s
        self.held = 0
        """Bytes of all shares."""
        self.peak = 0
        """The most, ever."""
        self.waiting = 0
        self.busy = asyncio.Event()
        """Set while anything is held."""
        self.clock = clock
        self._on_refused = on_refused
        self._connections: dict[str, _Connection] = {}
        # Those with waiters and room of their own, in the order of their turns.
        self._turns: dict[_Connection, None] = {}

    def take_now(self, peer: str, size: int) -> BudgetShare:
        """A share for an answer that exists already.  Raises Overloaded where there is no room."""
        connection = self._of(peer)
        if not self._fits(connection, size):
            raise self._overloaded(connection, size)
        return BudgetShare(self, connection, size)

    async def take(self, peer: str, size: int) -> BudgetShare:
        """A share as soon as it is this connection's turn.  Raises Overloaded after `timeout_s`."""
        connection = self._of(peer)
        if not connection.waiting and self._fits(connection, size):
            return BudgetShare(self, connection, size)
        if self.waiting >= WAITING_MAX:
            raise self._overloaded(connection, size)
        future: asyncio.Future[BudgetShare] = asyncio.get_running_loop().create_future()
        connection.waiting.append((size, future))
        self.waiting += 1
        self._grant(connection)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled():  # granted at the last moment
                future.result().give_back()
            self._leave(connection, size, future)
            if isinstance(error, TimeoutError):
                raise self._overloaded(connection, size) from None
            raise

    def stuck(self) -> list[str]:
        """Connections with an answer that is older than `timeout_s`."""
        latest = self.clock() - self.timeout_s
        return [
            connection.peer
            for connection in self._connections.values()
            if connection.shares and next(iter(connection.shares)).since <= latest
        ]

    def _of(self, peer: str) -> _Connection:
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(peer)
        return connection

    def _fits(self, connection: _Connection, size: int) -> bool:
        """An answer alone always fits, however large it is."""
        return self._fits_connection(connection, size) and (
            not self.held or self.held + size <= self.bytes_max
        )

    def _fits_connection(self, connection: _Connection, size: int) -> bool:
        return not connection.held or connection.held + size <= self.connection_bytes_max

    def _add(self, connection: _Connection, size: int) -> None:
        connection.held += size
        self.held += size
        if size > 0:
            self.peak = max(self.peak, self.held)
            self.busy.set()
        else:
            self._grant(connection)
            self._forget(connection)

    def _grant(self, connection: _Connection) -> None:
        """Gives room to those who wait, connection by connection."""
        if connection.waiting:
            self._turns.setdefault(connection)
        while self._turns:
            first = next(iter(self._turns))
            if not first.waiting or not self._fits_connection(first, first.waiting[0][0]):
                del self._turns[first]  # again when it gives something back
                continue
            size, future = first.waiting[0]
            if not self._fits(first, size):
                return
            del self._turns[first]
            self._turns[first] = None
            first.waiting.popleft()
            self.waiting -= 1
            if not future.done():
                future.set_result(BudgetShare(self, first, size))

    def _leave(
        self, connection: _Connection, size: int, future: "asyncio.Future[BudgetShare]"
    ) -> None:
        with suppress(ValueError):
            connection.waiting.remove((size, future))
            self.waiting -= 1
        self._grant(connection)
        self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        if not connection.held and not connection.waiting:
            self._turns.pop(connection, None)
            self._connections.pop(connection.peer, None)

    def _overloaded(self, connection: _Connection, size: int) -> Overloaded:
        self._on_refused()
        self._forget(connection)
        mine = not self._fits_connection(connection, size)
        held, limit = (
            (connection.held, self.connection_bytes_max) if mine else (self.held, self.bytes_max)
        )
        return Overloaded(
            f"{'this connection has' if mine else 'clients have'} not read {held} bytes of answers,"
            f" {limit} are allowed",
            field="unsent_bytes_max",
            value=held,
            limit=limit,
        )
