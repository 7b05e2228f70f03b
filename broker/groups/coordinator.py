"""Consumer groups: members come and go, queues are released before they are given away.

Pure: `now_ms` in, `Step` out (what to tell whom).  Owner and only caller: CoordinatorServicer on
the event loop.  `next_ms` says when `tick` wants to be called.

Words.  The *target* of a group says which member shall have which queue (allocation strategy).  The
*holdings* say who has been given which queue and has not released it.  The *generation* counts the
changes of target or members and never goes back.

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
holds between the processes too, and an older one is refused for good.

Restart.  Generation and members of each group are kept (`snapshot`, or each change: `changing`).  A
restarted coordinator, or one that a group moved to, does not know who holds what: members that come
back say so, and name the members that they were last told of (everyone is told when one comes or
goes).  Until all of these are back, or a session timeout has passed, the others' queues are not
given away (`hold`); for a newcomer, since the brokers changed, as then all members heard that the
group moved.  A group that nobody has heard of is assigned at once.  All members of a group
read the same with the same strategy; for a session timeout after a coordinator has come to a group,
those who were its members before decide what that is, and a newcomer that differs is turned out.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from duemq.errors import (
    DuemqError,
    FencedMember,
    GroupNotFound,
    InvalidArgument,
    NotCoordinator,
    NotReady,
    Overloaded,
)
from duemq.protocol.balance import (
    AVERAGE,
    MessageQueue,
    coordinator,
)
from duemq.protocol.pieces import Pieces, finish
from duemq_server.broker.groups import group_snapshot
from duemq_server.broker.groups.members import (
    SESSION_TIMEOUT_MS_DEFAULT,
    Group,
    Hello,
    Holding,
    Member,
    check_agree,
)
from duemq_server.broker.groups.rebalance import Assignment, TopicQueues, rebalancing
from duemq_server.broker.store.offsets import GENERATION_MARKS, newest_generation

__all__ = ["Assignment", "Coordinator", "Moved", "Step", "TurnedOut"]

GROUPS_MAX = 10_000
MEMBERS_MAX = 1_000  # a group
# Of a group: static member ids whose last incarnation is remembered, present or not.
INCARNATIONS_MAX = 2 * MEMBERS_MAX
EMPTY_GROUP_KEPT_MS = 7 * 24 * 3_600_000
# A tick later than this means that the coordinator slept, not the members: their sessions are
# prolonged by that, and by this once more for what they have sent meanwhile to be read.
STALL_MS_MAX = 1_000
# Raised when an older broker must not read a snapshot; what is only added has a default instead.
SNAPSHOT_VERSION = 1
DROPPED_MAX = 1_000  # groups that are not here any more, remembered for their generations


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


@dataclass(slots=True)
class Step:
    """What the members are to be told, in this order."""

    turned_out: list[TurnedOut] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)


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
        self._broker = broker
        self._mark = crc32(broker.encode()) % GENERATION_MARKS
        self._check_known = check_known
        self._session_timeout_ms = session_timeout_ms
        self._groups_max = groups_max
        self._groups: dict[str, Group] = {}
        self._dropped: dict[str, int] = {}  # the last groups that were, and their generations
        self._readable: Mapping[str, Iterable[MessageQueue]] = {}
        # Sorted, of topics that are read; and as they were before the routes changed last.
        self._queues: TopicQueues = {}
        self._queues_before: TopicQueues = {}
        self._touched: dict[str, None] = {}  # groups to rebalance
        self._brokers: frozenset[str] = frozenset()
        self._brokers_since_ms = 0
        self._next_ms: int | None = None
        # Groups that the snapshot holds otherwise than they are, and what it holds of each.
        self._changed: set[str] = set()
        self._kept: dict[str, bytes] = {}
        self._snapshot_lost = False

    # --- events, and the rebalance that follows -----------------------------------------------

    def join(self, hello: Hello, now_ms: int, known_generation: int = 0) -> Step:
        """As `enter`; the member is always told its assignment."""
        turned_out = self.enter(hello, now_ms, known_generation)
        return Step(turned_out, assignments=self._rebalance(now_ms))

    def released(
        self,
        group_name: str,
        member_id: str,
        generation: int,
        queues: Iterable[MessageQueue],
        now_ms: int,
    ) -> Step:
        """As `let_go`."""
        self.let_go(group_name, member_id, generation, queues, now_ms)
        return Step(assignments=self._rebalance(now_ms))

    def leave(self, group_name: str, member_id: str, now_ms: int) -> Step:
        """As `quit`."""
        self.quit(group_name, member_id, now_ms)
        return Step(assignments=self._rebalance(now_ms))

    def routes_changed(
        self, queues: Mapping[str, Iterable[MessageQueue]], brokers: Iterable[str], now_ms: int
    ) -> Step:
        """As `set_routes`."""
        moved = self.set_routes(queues, brokers, now_ms)
        return Step(moved=moved, assignments=self._rebalance(now_ms))

    def tick(self, now_ms: int) -> Step:
        """As `expire`."""
        self.expire(now_ms)
        return Step(assignments=self._rebalance(now_ms))

    def _rebalance(self, now_ms: int) -> list[Assignment]:
        told: list[Assignment] = []
        while (name := self.touched()) is not None:
            told += finish(self.rebalancing(name, now_ms))
        return told

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
        group = self._groups.get(name)
        if group is None:
            return []
        queues = yield from self._queues_of(group)
        before = group.generation
        told = yield from rebalancing(group, queues, self._mark, now_ms)
        if group.generation != before:
            self._changed.add(name)
        return told

    # --- events -------------------------------------------------------------------------------

    def enter(self, hello: Hello, now_ms: int, known_generation: int = 0) -> list[TurnedOut]:
        """A member came or came back.  Answers who does not fit the group as is known now.

        `known_generation` is the newest one that the broker has seen of this group in its
        offsets: not 0 means that the group lived before.  Raises InvalidArgument, NotCoordinator,
        GroupNotFound, Overloaded, and FencedMember to a static member that a newer one replaced.
        """
        hello.check()
        self._check_coordinator(hello.group)
        group = self._groups.get(hello.group) or self._new_group(hello, now_ms, known_generation)
        self._check_incarnation(group, hello)
        turned_out = self._misfits(group, hello, now_ms)
        if not turned_out:
            self._check_fits(group, hello)
        self._remove(group, [each.member_id for each in turned_out], now_ms)
        group.strategy = hello.strategy or AVERAGE
        newest = max(min(hello.generation, newest_generation(now_ms)), known_generation)
        if newest > group.generation:  # another coordinator was at work: be newer than it
            group.generation = newest
            group.outdated = True
        returning = hello.member_id in group.members
        group.members[hello.member_id] = Member(
            hello.member_id,
            dict(hello.subscriptions),
            group.strategy,
            hello.session_timeout_ms or self._session_timeout_ms,
            hello.client,
            now_ms,
            hello.incarnation,
            was_member=hello.generation > 0,
        )
        self._await_members(group, hello)
        if returning:
            self._drop_unowned(group, hello)
        else:
            self._changed.add(group.name)
        self._claim(group, hello)
        self._incarnate(group, hello)
        self._shake(group)
        return turned_out

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

    def quit(self, group_name: str, member_id: str, now_ms: int) -> None:
        """A member has let go of everything.  Idempotent.

        Raises NotCoordinator when the group has moved: it is awaited there.
        """
        group = self._groups.get(group_name)
        if group is None:
            self._check_coordinator(group_name)
        if group is None or member_id not in group.members:
            return
        self._remove(group, [member_id], now_ms)
        if group.hold_until_ms is not None and len(group.left) < MEMBERS_MAX:
            group.left.add(member_id)
        self._shake(group)

    def set_routes(
        self, queues: Mapping[str, Iterable[MessageQueue]], brokers: Iterable[str], now_ms: int
    ) -> list[Moved]:
        """The readable queues of every topic and the brokers, as the nameservers know them now.

        `queues` is asked, for as long as it holds, for topics that some group reads.  Answers who
        must ask another broker.
        """
        self._readable = queues
        self._queues_before, self._queues = self._queues, {}
        found = frozenset(brokers)
        if found != self._brokers:
            self._brokers, self._brokers_since_ms = found, now_ms
        moved: list[Moved] = []
        for group in list(self._groups.values()):
            owner = self.owner(group.name)
            if owner is not None and owner != self._broker:
                moved += [Moved(group.name, member, owner) for member in group.members]
                self._drop(group)
            else:
                self._shake(group)
        return moved

    def expire(self, now_ms: int) -> None:
        """Ends sessions and holds whose time is over."""
        if self._next_ms is not None and now_ms - self._next_ms > STALL_MS_MAX:
            self._forgive(now_ms - self._next_ms + STALL_MS_MAX)
        self._next_ms = None
        for group in list(self._groups.values()):
            expired = [
                member.member_id
                for member in group.members.values()
                if member.last_heard_ms + member.session_timeout_ms <= now_ms
            ]
            self._remove(group, expired, now_ms)
            if expired or (group.hold_until_ms is not None and group.hold_until_ms <= now_ms):
                self._shake(group)
            if not group.members and group.empty_since_ms + EMPTY_GROUP_KEPT_MS <= now_ms:
                self._drop(group)

    def next_ms(self) -> int | None:
        """Answers when `tick` must be called again; None: not before another event."""
        times = [
            member.last_heard_ms + member.session_timeout_ms
            for group in self._groups.values()
            for member in group.members.values()
        ]
        times += [g.hold_until_ms for g in self._groups.values() if g.hold_until_ms is not None]
        times += [
            g.empty_since_ms + EMPTY_GROUP_KEPT_MS for g in self._groups.values() if not g.members
        ]
        self._next_ms = min(times, default=None)
        return self._next_ms

    def forget(self, group_name: str) -> None:
        """The group is deleted.  Raises InvalidArgument while it has members."""
        group = self._groups.get(group_name)
        if group is None:
            return
        if group.members:
            raise InvalidArgument(
                f"group: {group_name!r} has {len(group.members)} members: close them first",
                field="group",
                value=group_name,
                limit="a group without members",
            )
        self._drop(group)

    def owner(self, group_name: str) -> str | None:
        """Answers the broker that coordinates a group, as this one sees the cluster.

        None: it sees nobody yet.
        """
        return coordinator(group_name, self._brokers)

    # --- looking inside -----------------------------------------------------------------------

    def groups(self) -> Iterable[Group]:
        """Answers the groups, for reading."""
        return self._groups.values()

    def group(self, name: str) -> Group:
        """Answers one group, for reading.  Raises GroupNotFound."""
        try:
            return self._groups[name]
        except KeyError:
            raise GroupNotFound(f"no group {name!r} here", field="group", value=name) from None

    # --- restart ------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """The snapshot differs from the last one taken."""
        return bool(self._changed) or self._snapshot_lost

    def snapshot(self) -> bytes:
        """As `snapshotting`, at once."""
        return finish(self.snapshotting())

    def snapshotting(self) -> Pieces[bytes]:
        """Answers what must survive a restart: generations and members (JSON).

        Only groups that have changed since the last one are encoded anew.
        """
        changes = yield from self.changing()
        for name, kept in changes.items():
            if kept is None:
                self._kept.pop(name, None)
            else:
                self._kept[name] = f"{json.dumps(name)}: {kept}".encode()
        self._snapshot_lost = False
        groups = b", ".join(self._kept.values())
        return b'{"version": %d, "groups": {%s}}' % (SNAPSHOT_VERSION, groups)

    def changing(self) -> Pieces[dict[str, str | None]]:
        """Answers what must survive of each group that was `changed`; None: it is gone.

        Each as it is now or later; one that changes in between is `changed` again.
        """
        changed, self._changed = self._changed, set()
        changes: dict[str, str | None] = {}
        for name in changed:
            group = self._groups.get(name)
            changes[name] = (yield from group_snapshot.encoding(group)) if group else None
            yield
        return changes

    def not_kept(self, groups: Iterable[str]) -> None:
        """What was answered of these could not be kept: they are `changed` still."""
        self._changed.update(groups)

    def snapshot_not_kept(self) -> None:
        """The last one could not be kept: another one is due, though nothing else has changed."""
        self._snapshot_lost = True

    def restore(self, snapshot: bytes, now_ms: int) -> None:
        """Takes a snapshot over, at start.  Raises ValueError for one of another version."""
        state = json.loads(snapshot)
        if state.get("version") != SNAPSHOT_VERSION:
            raise ValueError(f"groups snapshot has version {state.get('version')!r}, not 1")
        for name, kept in state["groups"].items():
            self._groups[name] = group_snapshot.decode(name, kept, now_ms)
            self._changed.add(name)

    def take_over(self, memberships: Mapping[str, str], now_ms: int) -> None:
        """As `restore`, of groups that were kept one by one, and still are (`changing`)."""
        for name, kept in memberships.items():
            self._groups[name] = group_snapshot.decode(name, json.loads(kept), now_ms)

    # --- checks -------------------------------------------------------------------------------

    def _check_coordinator(self, group_name: str) -> None:
        owner = self.owner(group_name)
        if owner is None:
            raise NotReady("this broker does not know the cluster yet")
        if owner != self._broker:
            raise NotCoordinator(
                f"group {group_name!r} is coordinated by {owner!r}",
                field="group",
                value=group_name,
                limit=owner,
            )

    def _check_incarnation(self, group: Group, hello: Hello) -> None:
        newest = group.incarnations.get(hello.member_id, 0)
        if hello.incarnation < newest:
            raise FencedMember(
                f"member {hello.member_id!r} of group {group.name!r} is another process now,"
                " started later",
                field="incarnation",
                value=hello.incarnation,
                limit=newest,
            )

    def _misfits(self, group: Group, hello: Hello, now_ms: int) -> list[TurnedOut]:
        """Newcomers that do not agree with the first of the former members to come back."""
        others = [m for m in group.members.values() if m.member_id != hello.member_id]
        if now_ms >= group.young_until_ms or not hello.generation:
            return []
        if any(other.was_member for other in others):
            return []
        found = []
        for other in others:
            try:
                check_agree(group.name, other, hello)
            except InvalidArgument as error:
                found.append(TurnedOut(group.name, other.member_id, error))
        return found

    def _check_fits(self, group: Group, hello: Hello) -> None:
        others = [m for m in group.members.values() if m.member_id != hello.member_id]
        if others:
            check_agree(group.name, hello, others[0])  # who agree with one another
        if len(others) >= MEMBERS_MAX:
            raise Overloaded(
                f"group {group.name!r} is full",
                field="members",
                value=str(len(others) + 1),
                limit=str(MEMBERS_MAX),
            )

    # --- state --------------------------------------------------------------------------------

    def _member(self, group_name: str, member_id: str) -> tuple[Group, Member]:
        group = self._groups.get(group_name)
        if group is None:
            self._check_coordinator(group_name)
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
        if len(self._groups) >= self._groups_max:
            self._make_room(hello.group)
        generation = self._dropped.pop(hello.group, 0)
        group = Group(hello.group, generation=generation, empty_since_ms=now_ms)
        timeout_ms = hello.session_timeout_ms or self._session_timeout_ms
        group.young_until_ms = now_ms + timeout_ms
        # Members of a coordinator before this one heard when the brokers changed.
        heard_ms = now_ms if hello.generation else min(now_ms, self._brokers_since_ms)
        if (hello.generation or known_generation) and heard_ms + timeout_ms > now_ms:
            group.absent = None
            group.hold_until_ms = heard_ms + timeout_ms
        self._groups[hello.group] = group
        return group

    def _make_room(self, name: str) -> None:
        """Drops the group that is without members for longest: a client may make up any number."""
        empty = [group for group in self._groups.values() if not group.members and not group.absent]
        if not empty:
            raise Overloaded(
                f"group: {name!r} is one too many, {len(self._groups)} groups have members here",
                field="group",
                value=name,
                limit=self._groups_max,
            )
        self._drop(min(empty, key=lambda group: group.empty_since_ms))

    def _drop(self, group: Group) -> None:
        """Rule 3 holds if it is made anew before the clock has passed its generation."""
        del self._groups[group.name]
        self._changed.add(group.name)
        self._dropped[group.name] = group.generation
        if len(self._dropped) > DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]

    def _incarnate(self, group: Group, hello: Hello) -> None:
        """A static member's new process gets what the old one had under a new generation."""
        if hello.incarnation == group.incarnations.get(hello.member_id, 0):
            return
        group.outdated = True
        self._changed.add(group.name)
        group.incarnations.pop(hello.member_id, None)
        group.incarnations[hello.member_id] = hello.incarnation
        if len(group.incarnations) > INCARNATIONS_MAX:
            gone = (each for each in group.incarnations if each not in group.members)
            del group.incarnations[next(gone)]

    def _await_members(self, group: Group, hello: Hello) -> None:
        """While holding back: everyone that anybody names is still to come, but for who has left.

        The others may not have heard of a goodbye that came before they did.
        """
        if group.hold_until_ms is not None and hello.members:
            awaited = dict(group.absent or {})
            for member in hello.members:
                settled = member in group.members or member in group.left
                if not settled and len(awaited) < MEMBERS_MAX:
                    awaited[member] = group.members[hello.member_id].session_timeout_ms
            group.absent = awaited
        if group.absent is not None:
            group.absent.pop(hello.member_id, None)

    def _drop_unowned(self, group: Group, hello: Hello) -> None:
        """What a member that came back does not have: its release, or our grant, was lost."""
        owned = set(hello.owned)
        for queue in group.all_held_by({hello.member_id}):
            if queue not in owned:
                del group.holdings[queue]

    def _claim(self, group: Group, hello: Hello) -> None:
        """Takes a member's word for what it holds, as far as it does not take from others."""
        if group.hold_until_ms is not None:
            for queue in hello.owned:
                other = group.holdings.get(queue)
                if other is None or other.claimed < hello.generation:
                    claim = Holding(hello.member_id, hello.generation, hello.generation)
                    group.holdings[queue] = claim

    def _remove(self, group: Group, member_ids: Collection[str], now_ms: int) -> None:
        if not member_ids:
            return
        for queue in group.all_held_by(set(member_ids)):
            del group.holdings[queue]
        for member_id in member_ids:
            del group.members[member_id]
        group.empty_since_ms = now_ms
        self._changed.add(group.name)

    def _forgive(self, late_ms: int) -> None:
        for group in self._groups.values():
            group.young_until_ms += late_ms
            for member in group.members.values():
                member.last_heard_ms += late_ms
            if group.hold_until_ms is not None:
                group.hold_until_ms += late_ms

    # --- rebalance ----------------------------------------------------------------------------

    def _shake(self, group: Group) -> None:
        """It is to be rebalanced as a whole."""
        group.shaken = True
        self._touched[group.name] = None

    def _queues_of(self, group: Group) -> Pieces[TopicQueues]:
        topics = {topic for member in group.members.values() for topic in member.subscriptions}
        queues: TopicQueues = {}
        for topic in sorted(topics):
            if topic not in self._queues:
                yield from self._look_up(topic)
            queues[topic] = self._queues[topic]
        return queues

    def _look_up(self, topic: str) -> Pieces[None]:
        """What is as it was before stays the same object: quick to compare."""
        found = list(self._readable.get(topic, ()))
        yield
        found.sort()
        queues = tuple(found)
        yield
        before = self._queues_before.get(topic)
        self._queues[topic] = before if before is not None and before == queues else queues
        yield
