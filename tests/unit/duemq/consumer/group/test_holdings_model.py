"""A member's holdings against what its coordinator may believe, in any order of events."""

from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duemq.consumer.group.holdings import Holdings, HoldingState
from duemq.errors import FencedMember
from duemq.protocol.balance import MessageQueue

QUEUES = tuple(MessageQueue("t", broker, queue_id) for broker in "ab" for queue_id in (0, 1))
SOME = st.frozensets(st.sampled_from(QUEUES))


class Machine(RuleBasedStateMachine):
    """The shell's part is played: tasks that run end when a rule says so."""

    def __init__(self):
        super().__init__()
        self.holdings = Holdings("earliest", (), 0, lambda topic, broker: 0, in_order=False)
        self.generation = 0
        self.told = set()  # the coordinator may give these to others
        self.connected = False  # a hello was sent and not lost since
        self.answered = False
        self.closed = False
        self.acquiring, self.releasing = [], []

    def carry_out(self, step):
        for holding in step.dropped:
            assert not self.holdings.holds(holding)
        if step.released is not None:
            generation, queues = step.released
            assert generation == self.generation
            assert self.answered
            self.told |= queues
        for holdings in step.release:
            assert all(each.state is HoldingState.RELEASING for each in holdings)
            assert not any(each in under_way for under_way in self.releasing for each in holdings)
            self.releasing.append(holdings)
        for broker, holdings in step.acquire.items():
            assert {each.queue.broker for each in holdings} == {broker}
            self.acquiring += holdings

    @rule()
    def hello(self):
        claimed = self.holdings.claim()
        assert set(claimed) == {each.queue for each in self.holdings.all}
        # What is not claimed, the coordinator gives to others.
        self.told = set(QUEUES) - set(claimed)
        self.connected, self.answered = True, False

    @precondition(lambda self: self.connected)
    @rule(queues=SOME)
    def assign(self, queues):
        self.generation += 1
        self.answered = True
        self.told -= queues
        self.carry_out(self.holdings.assigned(self.generation, queues))

    @precondition(lambda self: not self.closed)
    @rule()
    def close(self):
        self.closed = True
        self.releasing += [[each] for each in self.holdings.close()]

    @precondition(lambda self: self.acquiring)
    @rule(choice=st.integers(0, 100))
    def acquire(self, choice):
        holding = self.acquiring.pop(choice % len(self.acquiring))
        wanted = self.holdings.is_acquiring(holding)
        pulled = SimpleNamespace(pending=SimpleNamespace(commit_point=0))
        assert self.holdings.acquired(holding, pulled, frozenset()) == wanted

    @precondition(lambda self: self.releasing)
    @rule(choice=st.integers(0, 100))
    def release(self, choice):
        holdings = self.releasing.pop(choice % len(self.releasing))
        self.carry_out(self.holdings.released(holdings))

    @precondition(lambda self: self.holdings.all)
    @rule(choice=st.integers(0, 100))
    def lose(self, choice):
        holding = self.holdings.all[choice % len(self.holdings.all)]
        step = self.holdings.lost(holding, FencedMember("m", limit="3"))
        assert step.rejoin == 3
        self.carry_out(step)
        self.connected = False

    @precondition(lambda self: self.holdings.all)
    @rule(choice=st.integers(0, 100))
    def go_out_of_range(self, choice):
        active = [h for h in self.holdings.all if h.state is HoldingState.ACTIVE]
        if active:
            self.carry_out(self.holdings.begin_anew(active[choice % len(active)]))

    @rule()
    def end_session(self):
        self.carry_out(self.holdings.fenced())
        assert self.holdings.all == []
        self.connected = False

    @invariant()
    def what_others_may_have_is_not_consumed(self):
        assert not self.told & self.holdings.active
        if self.closed:
            assert not self.told & {each.queue for each in self.holdings.all}

    @invariant()
    def what_is_held_leads_somewhere(self):
        """No queue hangs: who is acquiring or releasing has a task that does it."""
        releasing = [each for holdings in self.releasing for each in holdings]
        for holding in self.holdings.all:
            if holding.state is HoldingState.ACQUIRING:
                assert holding in self.acquiring
            if holding.state is HoldingState.RELEASING:
                assert holding in releasing

    def teardown(self):
        """When the group has settled, all that is assigned is consumed, the rest is told."""
        self.hello()
        queues = frozenset(QUEUES[:2])
        self.assign(queues)
        while self.acquiring or self.releasing:
            while self.releasing:
                self.release(0)
            while self.acquiring:
                self.acquire(0)
        if self.closed:  # what it was assigned, too
            self.assign(frozenset())
            queues = frozenset()
        assert self.holdings.active == queues
        assert self.told >= set(QUEUES) - queues


TestHoldings = Machine.TestCase
TestHoldings.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
