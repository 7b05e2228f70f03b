"""Members are told what was decided of their groups, once that is kept (group_store.py).

    publish ──► _unsent ──(changes saved)──► outboxes of the sessions

Owned by: the event loop.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from duemq.errors import NotCoordinator, Overloaded, Unavailable
from duemq.protocol.route import RouteCache
from duemq.v1 import group_pb2
from duemq_server.broker.edge.members import messages, sessions
from duemq_server.broker.edge.members.sessions import Session
from duemq_server.broker.groups.coordinator import Assignment, Moved, TurnedOut
from duemq_server.broker.groups.group_table import GroupTable
from duemq_server.broker.slices import Slices

SAVE_AGAIN_S = 5.0  # after a disk has refused groups whose members were told

Key = tuple[str, str]  # group, member id
Told = Assignment | Moved | TurnedOut


class GroupStore(Protocol):
    """Where groups are kept.  Called by the event loop, one call at a time."""

    async def save(self, groups: GroupTable) -> Collection[str]:
        """What has changed is kept when this returns.

        Answers the groups whose members may not be told of it; these are saved with the next
        change.
        """
        ...


class Telling:
    """See the module."""

    def __init__(
        self,
        groups: GroupTable,
        group_store: GroupStore,
        routes: RouteCache,
        session_of: Callable[[Key], Session | None],
        clock: Callable[[], int],
    ) -> None:
        """`session_of`: over which stream a member speaks now; `clock`: that of the groups."""
        self._group_store = group_store
        self._groups = groups
        self._routes = routes
        self._session_of = session_of
        self._clock = clock
        self._unsent: dict[Session, list[Told]] = {}
        self._to_send = asyncio.Event()
        self.idle = asyncio.Event()
        """Nothing is to be sent or being saved."""
        self.idle.set()

    def publish(self, everything: Sequence[Told]) -> None:
        """To the streams as they are now: over a later one its hello is answered, nothing older."""
        for told in everything:
            session = self._session_of((told.group, told.member_id))
            if session is not None:
                self._put(session, told)
        self.idle.clear()
        self._to_send.set()

    def save(self) -> None:
        """Has what changed kept, though nobody is to be told of it."""
        self._to_send.set()

    def drop(self, session: Session) -> None:
        """Its stream has ended."""
        self._unsent.pop(session, None)

    def _put(self, session: Session, told: Told) -> None:
        """Within a generation an assignment only grows: the newest says it all."""
        unsent = self._unsent.setdefault(session, [])
        before = unsent[-1] if unsent else None
        if (
            isinstance(told, Assignment)
            and isinstance(before, Assignment)
            and before.generation == told.generation
        ):
            unsent[-1] = told
        elif len(unsent) < sessions.OUTBOX_EVENTS_MAX:
            unsent.append(told)
        else:
            session.tell(Overloaded("what this member is to hear is not stored as fast"))

    async def run(self) -> None:
        """Until cancelled."""
        unsaved: Collection[str] = ()
        while True:
            # Who was refused comes again, and that is an event.
            behind = self._groups.changed and not unsaved
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_AGAIN_S if behind else None):
                    await self._to_send.wait()
            self._to_send.clear()
            unsent, self._unsent = self._unsent, {}
            unsaved = ()
            if self._groups.changed:
                unsaved = await self._group_store.save(self._groups)
            await self._tell(unsent, unsaved)
            if not self._unsent:
                self.idle.set()

    async def _tell(
        self, unsent: Mapping[Session, Sequence[Told]], unsaved: Collection[str]
    ) -> None:
        slices = Slices()
        for session, everything in unsent.items():
            for told in everything:
                if told.group in unsaved:
                    session.tell(Unavailable("what this member is to hear could not be stored"))
                    break
                if isinstance(told, TurnedOut):
                    session.tell(told.error)
                elif self._session_of((told.group, told.member_id)) is session:
                    session.tell(await self._event(told, slices, outside=session.outside))

    async def _event(
        self, told: Assignment | Moved, slices: Slices, *, outside: bool
    ) -> group_pb2.CoordinatorEvent:
        if isinstance(told, Assignment):
            reads_for_ms = self._reads_for_ms(told.group)
            return await messages.assignment_event(
                told, self._routes, slices, reads_for_ms, outside=outside
            )
        error = NotCoordinator(f"group {told.group!r} is now coordinated by {told.coordinator!r}")
        return messages.elsewhere(error, told.coordinator, self._routes, outside=outside)

    def _reads_for_ms(self, name: str) -> dict[str, int]:
        group, now_ms = self._groups.find(name), self._clock()
        since_ms = group.reads_since_ms if group is not None else {}
        return {topic: max(0, now_ms - at_ms) for topic, at_ms in since_ms.items()}
