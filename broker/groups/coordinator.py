"""Consumer groups: members come and go, queues are released before they are given away.

Pure: `now_ms` in, what to tell whom out.  Owner and only caller: CoordinatorServicer on the event
loop, which rebalances after events each group that is `touched`.  `next_ms` says when `expire`
wants to be called.

Words.  The *target* of a group says which member shall have which queue (allocation strategy).  The
*holdings* say who has been given which queue and has not released it.  The *generation* counts the
changes of target or members and never goes back.

A member that is *leaving* is no queue's target, and holds what it has until it releases it.

    a queue      free ──granted to its target──► held ──released, or the holder's death──► free

Rules that hold in every history (tests/property/test_coordinator.py):
1. A queue is held by one member at most, and only its target is given a free queue.
2. A held queue whose target is another member stays held until the holder releases it, leaves, or
   is silent for its session timeout.  Queues whose target did not change are not touched.
3. Within one generation a queue has one target.  A member stamps commits with the generation it
   took the queue under, and brokers refuse older stamps than the newest taker's: so nothing that
   a member does after its queue went to another one can move the group's offset.
4. `released` counts only if it answers a newer assignment than the last one that granted the
   queue: a late one, overtaken by a new grant to the same member, frees nothing.
5. The target is made anew only when members, their topics or the queues change, so that it does
   not wander while queues are on their way.

Static members.  A member id with an incarnation is a place that processes take one after the other.
A newer one keeps the place's queues; they are granted to it under a new generation, so that rule 3
holds between the processes too, and an older one is refused for good.  If that one is connected,
its queues are nobody's until it has heard so (`gone`), or its session is over.

Restart.  Generation and members of each group are kept (`snapshot`, or each change: `changing`).  A
restarted coordinator, or one that a group moved to, does not know who holds what: members that come
back say so, and name the members that they were last told of (everyone is told when one comes or
goes).  Until all of these are back, or a session timeout has passed, the others' queues are not
given away (`hold`); for a newcomer, since the brokers changed, as then all members heard that the
group moved.  So it is where the group is known here, and another coordinator had it meanwhile: this
one slept, or was cut off, and whom it takes for members may have lost their queues.  A group that
nobody has heard of is assigned at once.  All members of a group read the same with the same
strategy; for a session timeout after a coordinator has come to a group, those who were its members
before decide what that is, and a newcomer that differs is turned out.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple
from zlib import crc32

from duemq.errors import DuemqError, FencedMember, InvalidArgument
from duemq.protocol.balance import AVERAGE, MessageQueue
from duemq.protocol.pieces import Pieces
from duemq_server.broker.groups import arrival
from duemq_server.broker.groups.cluster import Cluster
from duemq_server.broker.groups.group_table import GroupTable
from duemq_server.broker.groups.members import (
    MEMBERS_MAX,
    SESSION_TIMEOUT_MS_DEFAULT,
    Group,
    Hello,
    Member,
    Replaced,
)
from duemq_server.broker.groups.rebalance import Assignment, rebalancing
from duemq_server.broker.store.offsets import GENERATION_MARKS, newest_generation

__all__ = ["Assignment", "Coordinator", "Moved", "TurnedOut"]

GROUPS_MAX = 10_000
EMPTY_GROUP_KEPT_MS = 7 * 24 * 3_600_000
# An `expire` later than this means that the coordinator slept, not the members: their sessions are
# prolonged by that, and by this once more for what they have sent meanwhile to be read.
STALL_MS_MAX = 1_000


class Moved(NamedTuple):
    """A member must ask another broker."""

    group: str
    member_id: str
    coordinator: str


class TurnedOut(NamedTuple):
    """A member does not fit the group, as is known only now."""

    group: str
    member_id: str
    error: DuemqError


class Coordinator:
    """The groups that this broker coordinates."""

    def __init__(
        self,
        broker: str,
        *,
        session_timeout_ms: int = SESSION_TIMEOUT_MS_DEFAULT,
        groups_max: int = GROUPS_MAX,
        check_known: Callable[[str], None] = lambda group: None,
    ) -> None:
        """`check_known` raises GroupNotFound for a group that may not be made by joining it."""
        self.table = GroupTable(groups_max)
        """The groups, and what of them is to be kept."""
        self._cluster = Cluster(broker)
        self._mark = crc32(broker.encode()) % GENERATION_MARKS
        self._check_known = check_known
        self._session_timeout_ms = session_timeout_ms
        self._touched: dict[str, None] = {}  # groups to rebalance
        self._next_ms: int | None = None

    # --- the rebalance that follows events --------------------------------------------------

    def touched(self) -> str | None:
        """Answers a group that events have changed since it was rebalanced, once."""
        if not self._touched:
            return None
        name = next(iter(self._touched))
        del self._touched[name]
        return name

    def rebalancing(self, name: str, now_ms: int) -> Pieces[list[Assignment]]:
        """Rebalances a group that events have changed; members are always told before the next
        events.

        Between the pieces there may be heartbeats, snapshots and readers, no other events.
        """
        group = self.table.find(name)
        if group is None:
            return []
        queues = yield from self._cluster.queues_of(group)
        before = group.generation
        told = yield from rebalancing(group, queues, self._mark, now_ms)
        if group.generation != before:
            self.table.note(name)
        return told

    # --- events -------------------------------------------------------------------------------

    def enter(
        self,
        hello: Hello,
        now_ms: int,
        known_generation: int = 0,
        *,
        replaces_connected: bool = False,
    ) -> list[TurnedOut]:
        """A member came or came back.  Answers who does not fit the group as is known now.

        `known_generation` is the newest one that the broker has seen of this group in its
        offsets: not 0 means that the group lived before.  `replaces_connected`: the older process
        of this static member has a stream, and is `gone` when it says that it has read there why.
        Raises InvalidArgument, NotCoordinator, GroupNotFound, Overloaded, and FencedMember to a
        static member that a newer one replaced.
        """
        hello.check()
        self._cluster.check_coordinator(hello.group)
        known = self.table.find(hello.group)
        group = known or self._new_group(hello, now_ms, known_generation)
        arrival.check_incarnation(group, hello)
        misfits = arrival.misfits(group, hello, now_ms)
        if not misfits:
            arrival.check_fits(group, hello)
        self._remove(group, misfits.keys(), now_ms)
        group.strategy = hello.strategy or AVERAGE
        if group.hold_until_ms is None:
            lived = hello.generation or known_generation or self._cluster.has_sent_back(group.name)
            if arrival.was_elsewhere(group, hello, known_generation) if known else lived:
                self._hold_back(group, hello, now_ms)
        newest = max(min(hello.generation, newest_generation(now_ms)), known_generation)
        if newest > group.generation:  # another coordinator was at work: be newer than it
            group.generation = newest
            group.outdated = True
        returning = hello.member_id in group.members
        if returning and replaces_connected:
            arrival.keep_back(group, group.members[hello.member_id], now_ms)
        group.members[hello.member_id] = Member(
            hello.member_id,
            dict(hello.subscriptions),
            group.strategy,
            hello.session_timeout_ms or self._session_timeout_ms,
            hello.client,
            now_ms,
            hello.incarnation,
            was_member=hello.generation > 0,
            leaving=hello.leaving,
        )
        arrival.await_members(group, hello, known_generation)
        if returning:
            arrival.drop_unowned(group, hello)
        arrival.claim(group, hello)
        reads_other = group.reads(hello.subscriptions, now_ms)
        if arrival.incarnate(group, hello) or not returning or reads_other:
            self.table.note(group.name)
        self._shake(group)
        return [TurnedOut(group.name, *each) for each in misfits.items()]

    def heartbeat(self, group_name: str, member_id: str, now_ms: int) -> int:
        """Answers the group's generation.

        Raises FencedMember when the session is over, NotCoordinator when the group has moved.
        """
        group, member = self._member(group_name, member_id)
        member.last_heard_ms = now_ms
        return group.generation

    def let_go(
        self,
        group_name: str,
        member_id: str,
        generation: int,
        queues: Iterable[MessageQueue],
        now_ms: int,
    ) -> None:
        """A member has let go of queues, as the assignment of `generation` told it.

        Raises as `heartbeat`.
        """
        group, member = self._member(group_name, member_id)
        member.last_heard_ms = now_ms
        for queue in queues:
            holding = group.holdings.get(queue)
            if holding and holding.member_id == member_id and generation > holding.granted:
                del group.holdings[queue]
                group.freed.append(queue)
        self._touched[group_name] = None

    def retire(self, group_name: str, member_id: str, now_ms: int) -> None:
        """A member is to be assigned nothing any more: it lets go of its queues as work ends.

        Raises as `heartbeat`.
        """
        group, member = self._member(group_name, member_id)
        member.last_heard_ms = now_ms
        if not member.leaving:
            member.leaving = True
            self._shake(group)

    def quit(self, group_name: str, member_id: str, now_ms: int) -> None:
        """A member has let go of everything.  Idempotent.

        Raises NotCoordinator when the group has moved: it is awaited there.
        """
        group = self.table.find(group_name)
        if group is None:
            self._cluster.check_coordinator(group_name)
        if group is None or member_id not in group.members:
            return
        self._remove(group, [member_id], now_ms)
        if group.hold_until_ms is not None and len(group.left) < MEMBERS_MAX:
            group.left.add(member_id)
        self._shake(group)

    def gone(self, group_name: str, member_id: str, incarnation: int) -> None:
        """A replaced process knows that it is, and begins nothing any more.  Idempotent."""
        group = self.table.find(group_name)
        if group is not None and group.replaced:
            self._give_back(group, lambda each: each[:2] == (member_id, incarnation))

    def set_routes(
        self, queues: Mapping[str, Iterable[MessageQueue]], brokers: Iterable[str], now_ms: int
    ) -> list[Moved]:
        """The readable queues of every topic and the brokers, as the nameservers know them now.

        `queues` is asked, for as long as it holds, for topics that some group reads.  Answers who
        must ask another broker.
        """
        self._cluster.set_routes(queues, brokers, now_ms)
        moved: list[Moved] = []
        for group in self.table:
            owner = self._cluster.elsewhere(group.name)
            if owner is not None:
                moved += [Moved(group.name, member, owner) for member in group.members]
                self.table.drop(group)
            else:
                self._shake(group)
        return moved

    def expire(self, now_ms: int) -> None:
        """Ends sessions and holds whose time is over."""
        if self._next_ms is not None and now_ms - self._next_ms > STALL_MS_MAX:
            self._forgive(now_ms - self._next_ms + STALL_MS_MAX)
        self._next_ms = None
        for group in self.table:
            expired = [
                member.member_id
                for member in group.members.values()
                if member.last_heard_ms + member.session_timeout_ms <= now_ms
            ]
            self._remove(group, expired, now_ms)
            self._give_back(group, lambda replaced: replaced.until_ms <= now_ms)
            if expired or (group.hold_until_ms is not None and group.hold_until_ms <= now_ms):
                self._shake(group)
            if not group.members and group.empty_since_ms + EMPTY_GROUP_KEPT_MS <= now_ms:
                self.table.drop(group)

    def next_ms(self, awake_ms: int = 0) -> int | None:
        """Answers when `expire` must be called again; None: not before another event.  What was due
        before `awake_ms` waited for its turn: the caller did not sleep."""
        times = [
            member.last_heard_ms + member.session_timeout_ms
            for group in self.table
            for member in group.members.values()
        ]
        times += [each.until_ms for group in self.table for each in group.replaced.values()]
        times += [g.hold_until_ms for g in self.table if g.hold_until_ms is not None]
        times += [g.empty_since_ms + EMPTY_GROUP_KEPT_MS for g in self.table if not g.members]
        self._next_ms = max(awake_ms, min(times)) if times else None
        return self._next_ms

    def check_deletable(self, group_name: str) -> None:
        """Raises InvalidArgument while the group has or awaits members."""
        group = self.table.find(group_name)
        if group is not None and (group.members or group.absent):
            raise InvalidArgument(
                f"group: {group_name!r} has {len(group.members)} members, and awaits"
                f" {len(group.absent or ())}: close them first",
                field="group",
                value=group_name,
                limit="a group without members",
            )

    def forget(self, group_name: str) -> None:
        """The group is deleted.  Raises InvalidArgument as `check_deletable`."""
        self.check_deletable(group_name)
        group = self.table.find(group_name)
        if group is not None:
            self.table.drop(group)

    def owner(self, group_name: str) -> str | None:
        """Answers the broker that coordinates a group, as is seen here; None: nobody is yet."""
        return self._cluster.owner(group_name)

    # --- looking inside -----------------------------------------------------------------------

    def groups(self) -> Iterable[Group]:
        """Answers the groups, for reading."""
        return iter(self.table)

    def group(self, name: str) -> Group:
        """Answers one group, for reading.  Raises GroupNotFound."""
        return self.table.get(name)

    # --- state --------------------------------------------------------------------------------

    def _member(self, group_name: str, member_id: str) -> tuple[Group, Member]:
        group = self.table.find(group_name)
        if group is None:
            self._cluster.check_coordinator(group_name)
        member = group.members.get(member_id) if group else None
        if group is None or member is None:
            raise FencedMember(
                f"member {member_id!r} has no session in group {group_name!r}: join again",
                field="member_id",
                value=member_id,
            )
        return group, member

    def _new_group(self, hello: Hello, now_ms: int, known_generation: int) -> Group:
        if not (hello.generation or known_generation):
            self._check_known(hello.group)
        group = self.table.make(hello.group, now_ms)
        group.young_until_ms = now_ms + (hello.session_timeout_ms or self._session_timeout_ms)
        return group

    def _hold_back(self, group: Group, hello: Hello, now_ms: int) -> None:
        """Members of another coordinator, who heard when the brokers changed, may have queues."""
        timeout_ms = hello.session_timeout_ms or self._session_timeout_ms
        heard_ms = now_ms if hello.generation else min(now_ms, self._cluster.brokers_since_ms)
        members = group.members.values()
        if heard_ms + timeout_ms > now_ms:
            group.absent = {m.member_id: m.session_timeout_ms for m in members} or None
            group.hold_until_ms = heard_ms + timeout_ms
            group.young_until_ms = now_ms + timeout_ms

    def _remove(self, group: Group, member_ids: Collection[str], now_ms: int) -> None:
        if not member_ids:
            return
        for queue in group.all_held_by(set(member_ids)):
            del group.holdings[queue]
        for member_id in member_ids:
            del group.members[member_id]
        group.empty_since_ms = now_ms
        self.table.note(group.name)

    def _give_back(self, group: Group, ended: Callable[[Replaced], bool]) -> None:
        free = [queue for queue, replaced in group.replaced.items() if ended(replaced)]
        for queue in free:
            del group.replaced[queue]
        if free:
            group.freed += free
            self._touched[group.name] = None

    def _forgive(self, late_ms: int) -> None:
        for group in self.table:
            group.young_until_ms += late_ms
            for member in group.members.values():
                member.last_heard_ms += late_ms
            if group.hold_until_ms is not None:
                group.hold_until_ms += late_ms

    def _shake(self, group: Group) -> None:
        """It is to be rebalanced as a whole."""
        group.shaken = True
        self._touched[group.name] = None
