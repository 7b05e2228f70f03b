"""Brokers and members that see different clusters, and what a group's queues go through meanwhile.

Each broker and each member has a view of its own: any of the brokers, itself always.  Each broker
coordinates what its view makes it coordinate, and lets nobody take its queues over by the word of
another coordinator than the one it sees.  When all see the same again, the group is as if nothing
had been.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duemq.errors import FencedMember, NotCoordinator, NotReady
from duemq.protocol.balance import MessageQueue, allocate, average
from duemq.protocol.balance import coordinator as coordinator_of
from duemq_server.broker.groups.coordinator import Assignment
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.groups.subscriptions import TopicFilter
from tests.unit.broker.groups.stepping import Step, SteppingCoordinator

TIMEOUT_MS = 10_000
GROUP = "g"
BROKERS = ("b0", "b1", "b2")
QUEUES = [MessageQueue("t", broker, queue_id) for broker in BROKERS for queue_id in (0, 1)]
ONE_BROKER = st.sampled_from(BROKERS)
ONE_MEMBER = st.integers(0, 2)
VIEW = st.sets(ONE_BROKER)


@dataclass(eq=False)
class Member:
    """Follows the protocol, as the SDK does."""

    member_id: str
    view: frozenset[str] = frozenset(BROKERS)
    at: str = ""
    """The broker that its stream goes to."""
    hint: str = ""
    inbox: deque[tuple[str, Assignment]] = field(default_factory=deque)
    held: dict[MessageQueue, int] = field(default_factory=dict)
    """Queue → the generation that took it over."""
    wanted: frozenset[MessageQueue] = frozenset()
    coordinator: str = ""
    generation: int = 0
    floor: int = 0
    names: tuple[str, ...] = ()


class Disagreement(RuleBasedStateMachine):
    """One group, three brokers, three members."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_700_000_000_000
        self.brokers = {
            name: SteppingCoordinator(name, session_timeout_ms=TIMEOUT_MS) for name in BROKERS
        }
        self.members = [Member(f"m{number}") for number in range(3)]
        self.fences: dict[MessageQueue, int] = {}
        self.given: dict[tuple[int, MessageQueue], str] = {}

    @initialize()
    def begin(self) -> None:
        for broker in BROKERS:
            self.see(broker, frozenset(BROKERS))
        for member in self.members:
            self.hello(member)

    # --- what the shells do -------------------------------------------------------------------

    def see(self, broker: str, view: frozenset[str]) -> None:
        queues = {"t": [queue for queue in QUEUES if queue.broker in view]}
        self.publish(broker, self.brokers[broker].routes_changed(queues, view, self.now_ms))

    def publish(self, broker: str, step: Step) -> None:
        by_id = {member.member_id: member for member in self.members}
        for told in step.assignments:
            for queue in told.queues:
                owner = self.given.setdefault((told.generation, queue), told.member_id)
                assert owner == told.member_id, f"{queue} has two owners in {told.generation}"
            if by_id[told.member_id].at == broker:
                by_id[told.member_id].inbox.append((broker, told))
        for moved in step.moved:
            member = by_id[moved.member_id]
            if member.at == broker:
                member.at, member.hint = "", moved.coordinator

    def hello(self, member: Member) -> None:
        member.inbox.clear()
        member.wanted &= member.held.keys()
        member.at = ""
        hint, member.hint = member.hint, ""
        broker = hint or coordinator_of(GROUP, member.view)
        if broker is None:
            return
        hello = Hello(
            GROUP,
            member.member_id,
            {"t": TopicFilter()},
            generation=max(member.generation, member.floor),
            owned=tuple(member.held),
            members=member.names,
        )
        known = max((f for q, f in self.fences.items() if q.broker == broker), default=0)
        try:
            step = self.brokers[broker].join(hello, self.now_ms, known)
        except NotCoordinator as error:
            member.hint = error.limit
        except NotReady:
            pass
        else:
            member.at = broker
            self.publish(broker, step)

    def take_over(self, member: Member) -> None:
        for queue in sorted(member.wanted - member.held.keys()):
            follows = self.brokers[queue.broker].owner(GROUP)
            if follows is not None and follows != member.coordinator:
                if coordinator_of(GROUP, member.view) not in (member.coordinator, None):
                    self.hello(member)
                    return
            elif self.fences.get(queue, 0) > member.generation:
                self.lose(member, queue)
                return
            else:
                self.fences[queue] = member.held[queue] = member.generation

    def lose(self, member: Member, queue: MessageQueue) -> None:
        member.held.pop(queue, None)
        member.wanted -= {queue}
        member.floor = max(member.floor, self.fences[queue])
        self.hello(member)

    # --- history ------------------------------------------------------------------------------

    @rule(broker=ONE_BROKER, view=VIEW)
    def broker_sees(self, broker: str, view: set[str]) -> None:
        self.see(broker, frozenset({*view, broker}))

    @rule(number=ONE_MEMBER, view=VIEW)
    def member_sees(self, number: int, view: set[str]) -> None:
        self.members[number].view = frozenset(view)

    @rule(number=ONE_MEMBER)
    def reconnect(self, number: int) -> None:
        self.hello(self.members[number])

    @rule(number=ONE_MEMBER)
    def work(self, number: int) -> None:
        self.live(self.members[number])

    def live(self, member: Member) -> None:
        """Hears, lets go, takes over, pulls, heartbeats."""
        if not member.at:
            self.hello(member)
        if member.inbox:
            member.coordinator, told = member.inbox.popleft()
            member.generation, member.names = told.generation, told.members
            had = member.held.keys() | member.wanted  # also what could not be taken over yet
            member.wanted = frozenset(told.queues)
            going = had - member.wanted
            for queue in going:
                member.held.pop(queue, None)
            self.say(
                member,
                lambda at: at.released(
                    GROUP, member.member_id, told.generation, going, self.now_ms
                ),
            )
        self.take_over(member)
        for queue in sorted(member.held):
            if self.fences[queue] > member.held[queue]:  # as the next pull shows
                self.lose(member, queue)
                return
        self.say(member, lambda at: at.heartbeat(GROUP, member.member_id, self.now_ms))

    def say(self, member: Member, what) -> None:
        if not member.at:
            return
        try:
            step = what(self.brokers[member.at])
        except FencedMember:
            member.held.clear()
            member.wanted = frozenset()
            self.hello(member)
        except NotCoordinator as error:
            member.at, member.hint = "", error.limit
        else:
            if isinstance(step, Step):
                self.publish(member.at, step)

    @rule(milliseconds=st.sampled_from([0, 1, 3_000, TIMEOUT_MS]))
    def pass_time(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        for name, broker in self.brokers.items():
            while (next_ms := broker.next_ms()) is not None and next_ms <= self.now_ms:
                self.publish(name, broker.tick(self.now_ms))

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def one_member_may_commit_a_queue(self) -> None:
        for queue, fence in self.fences.items():
            may = [m.member_id for m in self.members if m.held.get(queue, 0) >= fence]
            assert len(may) <= 1, f"{queue}: {may}"

    def teardown(self) -> None:
        """All see the same: each queue has its one member, as the strategy says."""
        for broker in BROKERS:
            self.see(broker, frozenset(BROKERS))
        for member in self.members:
            member.view = frozenset(BROKERS)
        for _ in range(8):
            self.pass_time(TIMEOUT_MS // 2)
            for _ in range(4):
                for member in self.members:
                    self.live(member)
        found = {queue: m.member_id for m in self.members for queue in m.held}
        everyone = {member.member_id: ["t"] for member in self.members}
        assert found == allocate(average, QUEUES, everyone)
        assert {member.at for member in self.members} == {coordinator_of(GROUP, BROKERS)}


TestDisagreement = Disagreement.TestCase
