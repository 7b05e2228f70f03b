"""An operator's change of a group's members: asked for here, made by the leader's look at its set.

Who asked may go away, or wait no longer; what was asked of the store is settled all the same.
"""

from __future__ import annotations

import asyncio

from duemq.errors import InvalidArgument, Timeout, Unavailable
from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.in_sync import InSyncState, Swap
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.record import MemberChange, Record, Refused

CHANGE_S = 5.0
"""How long a change may take: a compare-and-set, after another one whose answer was lost."""


class MemberChanges:
    """One at a time.  Owned by Leading; used from its event loop."""

    def __init__(self, leader: Leader, min_insync: int, look_now: asyncio.Event) -> None:
        """`look_now` wakes whoever calls `next`."""
        self._leader = leader
        self._min = min_insync
        self._look_now = look_now
        self._asked: MemberChange | None = None
        self._done: asyncio.Future[None] | None = None
        self._ended = False

    @property
    def busy(self) -> bool:
        """Whether a change is waited for."""
        return self._asked is not None

    def would(self, change: MemberChange) -> str:
        """What a change comes to.  Raises InvalidArgument, Unavailable."""
        self._check_leads()
        try:
            record = records.with_change(self._leader.record, change, self._min)
        except Refused as refused:
            raise _invalid(change, refused) from refused
        return _told(record, change, self._min)

    async def make(self, change: MemberChange) -> None:
        """Returns when the record says so.  Raises InvalidArgument, Unavailable, Timeout."""
        self._check_leads()
        if self.busy:
            raise Unavailable("another change of members is under way: try again", field="replica")
        self._asked = change
        self._done = asyncio.get_running_loop().create_future()
        self._look_now.set()
        try:
            async with asyncio.timeout(CHANGE_S):
                await self._done
        except TimeoutError:
            raise Timeout(
                f"the store has not answered within {CHANGE_S:g} s: whether {change.name} is a"
                " member, `duemq replica status` says when it does",
                field="replica",
                value=change.name,
            ) from None
        except Refused as refused:
            raise _invalid(change, refused) from refused
        finally:
            self._asked = None

    def next(self) -> Swap | None:
        """What to ask the store for now."""
        change, done = self._asked, self._done
        if change is None or done is None or done.done():
            return None
        try:
            self._check_leads()
            swap = self._leader.change_members(change)
        except (Refused, Unavailable) as refused:
            done.set_exception(refused)
            return None
        if swap is None and self._leader.set.state is InSyncState.SETTLED:
            done.set_result(None)
        return swap

    def end(self) -> None:
        """The term is over: whoever leads next is to be asked."""
        self._ended = True
        if self._done is not None and not self._done.done():
            self._done.set_exception(
                Unavailable("this replica leads no more: look who does, and what the members are")
            )

    def _check_leads(self) -> None:
        if self._ended or self._leader.is_over():
            raise Unavailable("another replica is about to lead: ask that one", field="leader")


def _invalid(change: MemberChange, refused: Refused) -> InvalidArgument:
    return InvalidArgument(str(refused), field="replica", value=change.name)


def _told(record: Record, change: MemberChange, min_insync: int) -> str:
    members = ", ".join(sorted(record.members))
    text = f"members of {record.group} are {members} from now on"
    if change.joins:
        return f"{text}; {change.name} takes part when its process runs, with a `replicas` of these"
    in_sync = sorted({each.name for each in record.in_sync})
    text = f"{text}, in sync {', '.join(in_sync)}"
    if len(record.in_sync) < min_insync:
        text = f"{text}: fewer than min_insync, {min_insync}: nothing is accepted until more are"
    return text
