"""One Join stream of a member, from its first event to its end.

Owned by: the event loop.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from duemq.errors import FencedMember, Overloaded, Timeout
from duemq.protocol import checks
from duemq.protocol.limits import SESSION_TIMEOUT_MS_MAX
from duemq.transport import status
from duemq.v1 import group_pb2

HELLO_TIMEOUT_S = 10.0
# For a replaced process to say goodbye: no session is longer, which others wait for else.
FAREWELL_S = SESSION_TIMEOUT_MS_MAX / 1000
OUTBOX_EVENTS_MAX = 256  # to one member; one that does not read them loses its stream
HELLO_FIRST = "hello, a member's first event"


class Session:
    """One Join stream."""

    def __init__(self, incarnation: int, *, outside: bool = False) -> None:
        """`outside`: it came through the external port."""
        self.incarnation = incarnation
        self.outside = outside
        self.said_goodbye = False
        """Which counts also if the stream ends before its turn comes."""
        self.overrun = False
        """It does not read: what it says does not count any more, so that others get its queues."""
        self.fence: FencedMember | None = None
        """It is of a process that a newer one has replaced."""
        self.outbox: asyncio.Queue[group_pb2.CoordinatorEvent | Exception | None] = asyncio.Queue(
            OUTBOX_EVENTS_MAX
        )

    def tell(self, event: group_pb2.CoordinatorEvent | Exception | None) -> None:
        """Queues an event; an error, or None, is the last one."""
        if self.fence is not None and isinstance(event, group_pb2.CoordinatorEvent):
            return  # what it has been told was the last of these
        if self.outbox.full():
            while not self.outbox.empty():
                self.outbox.get_nowait()
            event = Overloaded("this member does not read what it is told")
            self.overrun = True
        self.outbox.put_nowait(event)

    def replace(self, newer: "Session") -> None:
        """The member speaks over another stream now; this one ends."""
        if newer.incarnation == self.incarnation:
            self.tell(FencedMember("this member has come back over another stream"))
            return
        fence = FencedMember(
            "this member is another process now, started later",
            field="incarnation",
            value=self.incarnation,
            limit=newer.incarnation,
        )
        self.tell(group_pb2.CoordinatorEvent(error=status.to_proto(fence)))
        self.fence = fence

    async def farewell(self) -> None:
        """A process that is fenced has read that when it says goodbye."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self.outbox.get()  # its end, or the broker's


async def first_event(requests: AsyncIterator[group_pb2.MemberEvent]) -> group_pb2.MemberEvent:
    """Raises InvalidArgument if none comes; Timeout if none comes soon: it may be on its way."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(requests)
    except StopAsyncIteration:
        raise checks.wrong("event", None, HELLO_FIRST) from None
    except TimeoutError:
        raise Timeout(f"event: no hello within {HELLO_TIMEOUT_S:g} s", field="event") from None


async def speak(session: Session, context: Any) -> None:
    """Writes what a session is told, until the end.  Raises the error that it ends with."""
    while True:
        event = await session.outbox.get()
        if event is None:
            return
        if isinstance(event, Exception):
            raise event
        await context.write(event)
        if event.WhichOneof("event") == "error":
            if session.fence is not None:
                await session.farewell()
                raise session.fence
            return
