"""Where a member stands in its group: whom it asks, what it knows, what an error means to it.

Plain Python; owner and only caller: Membership on the event loop, which draws the picture.
"""

import enum
from collections.abc import Iterable, Sequence

from duemq.errors import (
    DuemqError,
    FencedMember,
    NotCoordinator,
    Rejected,
    Timeout,
    Unavailable,
)
from duemq.protocol import balance

HEARTBEATS_PER_SESSION = 4
# `field` of the FencedMember that ends a static member.
REPLACED = "incarnation"
INCARNATION_MAX = (1 << 64) - 1_000_000


class After(enum.Enum):
    """What a member does when a session has ended with an error."""

    JOIN_AGAIN = enum.auto()
    """It has its session timeout to come back, and keeps its queues."""
    LET_GO = enum.auto()
    """Others have its queues: it drops them, then joins again."""
    GIVE_UP = enum.auto()
    """The group does not take it, or a newer process has its place."""


class Standing:
    """Of one member."""

    def __init__(self, group: str, session_timeout_ms: float, incarnation: int = 0) -> None:
        """`incarnation`: of a static member, else 0."""
        self.generation = 0
        """Of the last assignment."""
        self.coordinator = ""
        """That made it."""
        self.members: Sequence[str] = ()
        """That it named."""
        self.trouble = ""
        """What the last attempt to join ended with, for people."""
        self.incarnation = incarnation
        self.leaving = False
        """It wants no queue any more, and may still have some."""
        self.left = False
        """It is to go, or has gone."""
        self.owes_goodbye = False
        self.heartbeat_ms = session_timeout_ms / HEARTBEATS_PER_SESSION
        """Between two heartbeats."""
        self._group = group
        self._session_timeout_ms = session_timeout_ms
        self._hint = ""  # coordinator as the last NOT_COORDINATOR named it
        self._seen = 0  # a generation that a broker has seen
        self._heard_ms = -float("inf")  # the last event of a coordinator
        self._unacknowledged = False  # the last heartbeat

    # --- whom it asks -------------------------------------------------------------------------

    def ask(self, brokers: Iterable[str]) -> str:
        """The broker to join at.  Raises Unavailable."""
        hint, self._hint = self._hint, ""
        name = hint or balance.coordinator(self._group, brokers)
        if name is None:
            raise Unavailable("no broker is known")
        return name

    def redirected(self, coordinator: str) -> None:
        """A broker named another as the coordinator: that one is asked next."""
        self._hint = coordinator

    def disagrees(self, coordinator: str, brokers: Iterable[str]) -> bool:
        """As this member sees the cluster, another broker coordinates the group."""
        return balance.coordinator(self._group, brokers) not in (coordinator, None)

    @property
    def hello_generation(self) -> int:
        """The newest generation that it knows of."""
        return max(self.generation, self._seen)

    def seen(self, generation: int) -> None:
        """A broker says that this one is out."""
        self._seen = max(self._seen, generation)

    # --- what it hears ------------------------------------------------------------------------

    def begin(self) -> None:
        """A session begins."""
        self._unacknowledged = False

    def heard(self, now_ms: float) -> None:
        """Anything of the coordinator."""
        self._heard_ms = now_ms
        self._unacknowledged = False

    def assigned(self, generation: int, coordinator: str, members: Iterable[str]) -> None:
        """An assignment came."""
        self.generation, self.coordinator = generation, coordinator
        self.members = list(members)

    def beat(self) -> None:
        """A heartbeat is sent, `heartbeat_ms` after the last one.

        Raises Timeout when nothing was heard since that.
        """
        if self._unacknowledged:
            raise Timeout(f"no heartbeat answer within {self.heartbeat_ms / 1000:g} s")
        self._unacknowledged = True

    def failed(self, error: DuemqError, now_ns: int) -> After:
        """A session ended with an error; `now_ns`: by this machine's clock."""
        if isinstance(error, Rejected):
            return After.GIVE_UP
        if isinstance(error, FencedMember):
            if error.field != REPLACED:
                return After.LET_GO
            if not self._comes_after(error.limit, now_ns):
                return After.GIVE_UP
        if isinstance(error, NotCoordinator):
            self.redirected(error.limit)
        self.trouble = str(error)
        return After.JOIN_AGAIN

    def _comes_after(self, newest: str, now_ns: int) -> bool:
        """Whether it is the newer process all the same, and has a greater incarnation from now on.

        It has just begun, and the other one did so in what is the future here: it would be refused
        until then.  Of two such, one is newer.
        """
        if self.generation or not newest.isdecimal():
            return False
        if not now_ns < int(newest) < INCARNATION_MAX:
            return False
        self.incarnation = int(newest) + 1 + now_ns % 1_000_000
        return True

    # --- leaving ------------------------------------------------------------------------------

    def leave(self, *, silently: bool) -> None:
        """It is to go.  A static member says no goodbye: its queues wait for its return."""
        self.left = True
        self.owes_goodbye = not silently and not self.incarnation
        self.leaving |= self.owes_goodbye  # in a hello that is said for the goodbye only

    def stream_ended(self) -> bool:
        """Whether that was the answer to a goodbye."""
        said, self.owes_goodbye = self.owes_goodbye, False
        return said

    def may_say_goodbye(self, now_ms: float) -> bool:
        """Whether the group still has it.

        Later the session is over anyway; a hello would make a new member for others to make room
        for.
        """
        return now_ms - self._heard_ms <= self._session_timeout_ms
