"""Any history of a group: members, streams, deaths, zombies, restarts and moves of the coordinator.

The members here follow the protocol as the SDK does; their streams lose what is under way when they
break.  Each is a process; those of a static member have one member id and a growing incarnation.
`Fences` stands for the brokers' offsets: the newest generation that took each queue over.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from duemq.errors import FencedMember
from duemq.protocol.balance import AVERAGE, STICKY, MessageQueue, allocate, average
from duemq.protocol.pieces import Pieces, finish
from duemq_server.broker.groups.coordinator import Assignment
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.groups.subscriptions import TopicFilter
from tests.unit.broker.groups.stepping import Step, SteppingCoordinator

TIMEOUT_MS = 10_000
GROUP = "g"
ROUNDS_MAX = 1_000  # to settle in


@dataclass
class Hold:
    """A queue as its member sees it.  `orphan`: the member's session has ended since."""

    generation: int
    releasing: bool = False
    orphan: bool = False


@dataclass(eq=False)
class Member:
    """A member's process that follows the protocol."""

    member_id: str
    incarnation: int = 0
    inbox: deque[Assignment] = field(default_factory=deque)
    outbox: deque[tuple[int, MessageQueue] | None] = field(default_factory=deque)
    """Released; None: a heartbeat that says it is leaving."""
    held: dict[MessageQueue, Hold] = field(default_factory=dict)
    wanted: frozenset[MessageQueue] = frozenset()
    generation: int = 0
    names: tuple[str, ...] = ()  # all members, as the last assignment said
    untold: set[MessageQueue] = field(default_factory=set)  # released: for the next assignment
    answered: bool = False  # its hello
    connected: bool = False
    leaving: bool = False  # takes nothing any more
    replaced_until_ms: int = 0  # replaced while connected: its queues wait so long
    dead: bool = False


class Interrupted(SteppingCoordinator):
    """Between the pieces of a rebalance it is saved, read, and sent heartbeats."""

    def __init__(self, broker: str, history: "GroupHistory", **options: int) -> None:
        super().__init__(broker, **options)
        self._history = history

    def rebalancing(self, name: str, now_ms: int) -> Pieces[list[Assignment]]:
        work = super().rebalancing(name, now_ms)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value
            self._interrupt(now_ms)
            yield

    def _interrupt(self, now_ms: int) -> None:
        if self.table.changed:
            self._history.saved = self.table.snapshot()
        for group in self.groups():
            finish(group.held())
            for member_id in group.members:
                self.heartbeat(group.name, member_id, now_ms)


class GroupHistory(RuleBasedStateMachine):
    """One group, one coordinator that may be killed."""

    members = Bundle("members")

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_700_000_000_000
        self.everyone: list[Member] = []
        self.speakers: dict[str, Member] = {}  # who speaks for a member id
        self.strategy = AVERAGE
        self.fences: dict[MessageQueue, int] = {}
        self.given: dict[tuple[int, MessageQueue], Member] = {}
        self.queue_count = 0
        self.saved: bytes | None = None
        self.moved = False  # the coordinator has not heard of the group yet
        self.has_moved = False
        self.newest_ms = 0
        self.coordinator = Interrupted("b1", self, session_timeout_ms=TIMEOUT_MS)

    # --- the shell around the core --------------------------------------------------------

    def publish(self, step: Step) -> None:
        if self.coordinator.table.changed:
            self.saved = self.coordinator.table.snapshot()
        self.orphan_lost_sessions()
        for assignment in step.assignments:
            self.check_nothing_is_given_twice(assignment)
            member = self.speakers[assignment.member_id]
            if member.connected:
                member.inbox.append(assignment)

    def orphan_lost_sessions(self) -> None:
        for member in self.everyone:
            if self.has_no_session(member):
                for hold in member.held.values():
                    hold.orphan = True

    def has_no_session(self, member: Member) -> bool:
        """The coordinator has given it up; not: it waits for it, or has not heard of the group."""
        groups = {group.name: group for group in self.coordinator.groups()}
        group = groups.get(GROUP)
        self.moved = self.moved and group is None
        if group is None:
            return not self.moved
        if group.incarnations.get(member.member_id, 0) > member.incarnation:
            return member.replaced_until_ms <= self.now_ms
        return member.member_id not in group.members and group.hold_until_ms is None

    def check_nothing_is_given_twice(self, assignment: Assignment) -> None:
        taker = self.speakers[assignment.member_id]
        for queue in assignment.queues:
            owner = self.given.setdefault((assignment.generation, queue), taker)
            assert owner is taker, f"{queue} has two owners in {assignment.generation}"
        for queue in set(assignment.queues) - taker.held.keys():
            for other in self.everyone:
                if other is not taker and queue in other.held:
                    assert other.held[queue].orphan, f"{queue} is still with {other.member_id}"

    def routes(self) -> list[MessageQueue]:
        return [MessageQueue("t", f"b{n % 2}", n // 2) for n in range(self.queue_count)]

    # --- history --------------------------------------------------------------------------

    @initialize(queue_count=st.integers(0, 9), strategy=st.sampled_from([AVERAGE, STICKY]))
    def begin(self, queue_count: int, strategy: str) -> None:
        self.strategy = strategy
        self.change_queues(queue_count)

    @rule(queue_count=st.integers(0, 9))
    def change_queues(self, queue_count: int) -> None:
        self.queue_count = queue_count
        self.publish(self.coordinator.routes_changed({"t": self.routes()}, ["b1"], self.now_ms))

    @rule(target=members, name=st.integers(0, 6))
    def new_member(self, name: int) -> Member:
        """Ids are never used twice: a member that comes anew has a new one."""
        return self.start(Member(f"m{name}-{len(self.everyone)}"))

    @rule(target=members, place=st.integers(0, 2), closed=st.booleans())
    def new_process(self, place: int, closed: bool) -> Member:
        """Of a static member; the one before was closed, or is dead, or a zombie."""
        before = self.speakers.get(f"s{place}")
        if closed and before is not None:
            before.held.clear()
            before.dead, before.connected = True, False
        return self.start(Member(f"s{place}", incarnation=len(self.everyone) + 1))

    def start(self, member: Member) -> Member:
        self.everyone.append(member)
        self.hello(member)
        return member

    def hello(self, member: Member) -> None:
        member.inbox.clear()
        member.outbox.clear()
        member.untold.clear()
        member.answered = False
        member.connected = True
        # Nothing is taken over any more under an assignment of a session that may be over.
        member.wanted = frozenset(
            q for q in member.wanted & member.held.keys() if not member.held[q].releasing
        )
        known = max(self.fences.values(), default=0)
        hello = Hello(
            GROUP,
            member.member_id,
            {"t": TopicFilter()},
            strategy=self.strategy,
            generation=member.generation,
            owned=tuple(member.held),
            members=member.names,
            incarnation=member.incarnation,
            leaving=member.leaving,
        )
        before = self.speakers.get(member.member_id)
        connected = before is not None and before is not member and before.connected
        until_ms = self.session_until_ms(member.member_id)
        try:
            step = self.coordinator.join(hello, self.now_ms, known, replaces_connected=connected)
        except FencedMember:  # of a static member only: its place is another process's
            self.end(member)
            return
        if before is not None and connected:
            before.replaced_until_ms = until_ms
        self.replace(member)
        self.publish(step)

    def session_until_ms(self, member_id: str) -> int:
        for group in self.coordinator.groups():
            if member_id in group.members:
                return group.members[member_id].last_heard_ms + TIMEOUT_MS
        return 0

    @rule(member=members)
    def hear_of_a_newer_process(self, member: Member) -> None:
        """It lets go of everything, and says so."""
        if member.replaced_until_ms and not member.dead:
            self.end(member)
            self.publish(
                self.coordinator.replaced_is_gone(
                    GROUP, member.member_id, member.incarnation, self.now_ms
                )
            )

    def replace(self, member: Member) -> None:
        """The stream before ends; a zombie learns why when it wakes up."""
        before = self.speakers.get(member.member_id)
        self.speakers[member.member_id] = member
        if before is not None and before is not member:
            before.connected = False
            before.inbox.clear()
            before.outbox.clear()

    def end(self, member: Member) -> None:
        """Its place is another process's."""
        member.held.clear()
        member.wanted = frozenset()
        member.dead, member.connected = True, False

    @rule(member=members)
    def reconnect(self, member: Member) -> None:
        if not member.dead:
            self.hello(member)

    @rule(member=members)
    def hear(self, member: Member) -> None:
        """The member takes in the next assignment."""
        if member.dead or not member.inbox:
            return
        assignment = member.inbox.popleft()
        member.generation = assignment.generation
        member.names = assignment.members
        member.wanted = frozenset(assignment.queues)
        member.answered = True
        if member.connected:
            member.outbox.extend((member.generation, q) for q in member.untold - member.wanted)
        member.untold = set(member.wanted - member.held.keys()) if member.leaving else set()
        for queue, hold in member.held.items():
            if queue not in member.wanted:
                hold.releasing = True
            elif hold.generation >= self.fences[queue]:
                hold.orphan = self.has_no_session(member)  # else it was given to this session
        overtaken = {
            queue
            for queue in member.wanted & member.held.keys()
            if member.held[queue].generation < self.fences[queue]
        }
        for queue in overtaken:
            del member.held[queue]
        member.wanted -= overtaken
        self.take_over(member)
        if overtaken and member.connected:  # as the next pull shows: what is true?
            self.hello(member)

    def take_over(self, member: Member) -> None:
        if member.leaving:
            return
        for queue in member.wanted - member.held.keys():
            if self.fences.get(queue, 0) > member.generation:
                member.wanted -= {queue}  # someone is newer: what is true?
                self.hello(member)
                return
            holders = [m for m in self.everyone if queue in m.held]
            same = [m for m in holders if m.held[queue].generation == member.generation]
            assert not same, f"{queue} has two owners in generation {member.generation}"
            self.fences[queue] = member.generation
            member.held[queue] = Hold(member.generation, orphan=self.has_no_session(member))

    @rule(member=members)
    def release(self, member: Member) -> None:
        """The member has finished with one of the queues that it must give up."""
        for queue, hold in list(member.held.items()):
            if hold.releasing and not member.dead:
                del member.held[queue]
                if member.connected and (member.leaving or queue not in member.wanted):
                    if member.answered and queue not in member.wanted:
                        member.outbox.append((member.generation, queue))
                    else:
                        member.untold.add(queue)
                self.take_over(member)
                return

    @rule(member=members)
    def retire(self, member: Member) -> None:
        """It closes, and some of its work lasts.  A static member's queues wait for its return."""
        if member.dead or member.leaving or member.incarnation:
            return
        member.leaving = True
        for hold in member.held.values():
            hold.releasing = True
        if member.connected:
            member.outbox.append(None)

    @rule(member=members)
    def speak(self, member: Member) -> None:
        """The coordinator hears the next thing that the member said, or its heartbeat."""
        if member.dead or not member.connected:
            return
        try:
            if member.outbox:
                self.publish(self.say(member, member.outbox.popleft()))
            else:
                self.coordinator.heartbeat(GROUP, member.member_id, self.now_ms)
        except FencedMember:
            member.held.clear()
            member.wanted = frozenset()
            self.hello(member)

    def say(self, member: Member, said: tuple[int, MessageQueue] | None) -> Step:
        if said is None:
            return self.coordinator.leaving(GROUP, member.member_id, self.now_ms)
        generation, queue = said
        return self.coordinator.released(GROUP, member.member_id, generation, [queue], self.now_ms)

    @rule(member=consumes(members))
    def leave(self, member: Member) -> None:
        if not member.dead and self.speakers[member.member_id] is member:
            member.held.clear()
            member.dead = True
            self.publish(self.coordinator.leave(GROUP, member.member_id, self.now_ms))

    @rule(member=consumes(members))
    def kill(self, member: Member) -> None:
        member.dead = True
        member.connected = False

    @rule(milliseconds=st.sampled_from([1, 100, 3_000, 9_999, 10_000, 11_000]))
    def pass_time(self, milliseconds: int) -> None:
        until_ms = self.now_ms + milliseconds
        while (next_ms := self.coordinator.next_ms()) is not None and next_ms <= until_ms:
            self.now_ms = max(self.now_ms, next_ms)
            self.publish(self.coordinator.tick(self.now_ms))
        self.now_ms = until_ms

    @rule(backwards=st.booleans(), lost=st.booleans())
    def restart_coordinator(self, backwards: bool, lost: bool) -> None:
        """Killed after it saved; what it said is lost with the streams, or still to be read."""
        self.coordinator = Interrupted("b1", self, session_timeout_ms=TIMEOUT_MS)
        if self.saved is not None:
            if backwards and not self.has_moved:  # there the time tells generations apart too
                self.newest_ms = max(self.newest_ms, self.now_ms)
                self.now_ms -= 60_000
            self.coordinator.table.restore(self.saved, self.now_ms)
        for member in self.everyone:
            member.connected = False
            member.replaced_until_ms = 0  # nobody knows of it any more
            if lost:
                member.inbox.clear()
            member.outbox.clear()
        self.publish(self.coordinator.routes_changed({"t": self.routes()}, ["b1"], self.now_ms))

    @rule()
    def move_to_another_coordinator(self) -> None:
        """It knows nothing, its clock is not behind; the members have heard everything, and nobody
        is a zombie.

        (A zombie could claim what it lost before the new coordinator hears of the true holder.  The
        commits of that one are those that count all the same: one_member_may_commit_a_queue.)
        """
        for member in self.everyone:
            while member.inbox and not member.dead:
                self.hear(member)
            if self.speakers[member.member_id] is not member:
                self.end(member)
            elif any(hold.orphan for hold in member.held.values()):
                member.held.clear()
                member.wanted = frozenset()
        self.saved, self.moved, self.has_moved = None, True, True
        self.now_ms = max(self.now_ms, self.newest_ms) + 100
        self.restart_coordinator(backwards=False, lost=True)

    # --- what always holds ----------------------------------------------------------------

    @invariant()
    def one_member_may_commit_a_queue(self) -> None:
        for queue, fence in self.fences.items():
            may = [
                m.member_id
                for m in self.everyone
                if queue in m.held and m.held[queue].generation >= fence
            ]
            assert len(may) <= 1, f"{queue}: {may}"

    def is_releasing(self, member: Member) -> bool:
        return any(hold.releasing for hold in member.held.values())

    def teardown(self) -> None:
        """Left alone, the group settles: everything is shared, as the strategy says."""
        live = [m for m in self.everyone if not m.dead]
        for _ in range(4):
            self.pass_time(TIMEOUT_MS // 2)
            for member in live:
                if not member.connected:
                    self.hello(member)
                self.speak(member)
        live = [m for m in live if not m.dead]
        assert all(self.speakers[m.member_id] is m for m in live)
        for _ in range(ROUNDS_MAX):
            if not any(m.inbox or m.outbox or self.is_releasing(m) for m in live):
                break
            for member in live:
                self.hear(member)
                self.release(member)
                self.speak(member)
        else:
            raise AssertionError(f"the group has not settled after {ROUNDS_MAX} rounds")
        found = {queue: m.member_id for m in live for queue in m.held}
        staying = [m.member_id for m in live if not m.leaving]
        if self.strategy == AVERAGE:
            assert found == allocate(average, self.routes(), {m: ["t"] for m in staying})
        elif staying:
            assert sorted(found) == sorted(self.routes())
            shares = Counter(found.values())
            assert {shares[m] for m in staying} <= {
                self.queue_count // len(staying) + n for n in (0, 1)
            }
        assert all(not hold.orphan for m in live for hold in m.held.values())


GroupHistory.TestCase.settings = settings(deadline=None)
TestGroupHistory = GroupHistory.TestCase
