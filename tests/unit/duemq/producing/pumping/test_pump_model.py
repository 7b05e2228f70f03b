"""The pump among brokers whose streams break: nothing is lost, stored twice or out of order."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duemq.errors import InvalidArgument, Timeout, TooLarge
from duemq.producing.pumping.pump import NEVER
from tests.unit.duemq.producing.pumping.played_brokers import (
    SEND_TIMEOUT_S,
    PlayedCluster,
    overloaded,
    too_large,
)

BROKERS = st.sampled_from(["a", "b"])


class Machine(RuleBasedStateMachine):
    """Whatever happens, in whatever order."""

    def __init__(self):
        super().__init__()
        self.cluster = PlayedCluster(("a", "b"), queues=2)
        self.brokers = self.cluster.brokers
        self.batches = {}
        self.key_of = {}

    def any_broker(self, name, has):
        return (
            name if has(self.brokers[name]) else next(iter(b for b in "ab" if has(self.brokers[b])))
        )

    @rule(
        key=st.sampled_from([None, "k1", "k2", "k3"]),
        bodies=st.sampled_from([1, 1, 400]),
        large=st.sampled_from([0, 0, 1, 2]),
    )
    def submit(self, key, bodies, large):
        batch = self.cluster.submit(key, bodies=bodies, large=large)
        self.batches[batch.number] = batch
        self.key_of[batch.number] = key

    @precondition(lambda self: any(each.wanted and not each.up for each in self.brokers.values()))
    @rule(name=BROKERS)
    def connect(self, name):
        self.cluster.connect(self.any_broker(name, lambda each: each.wanted and not each.up))

    @precondition(lambda self: any(each.frames for each in self.brokers.values()))
    @rule(name=BROKERS, refusal=st.sampled_from([None] * 4 + ["overloaded", "wrong", "large"]))
    def arrive(self, name, refusal):
        broker = self.brokers[self.any_broker(name, lambda each: each.frames)]
        errors = {"overloaded": overloaded(), "wrong": InvalidArgument("no"), "large": too_large()}
        broker.arrive([(0, errors[refusal])] if refusal else ())

    @precondition(lambda self: any(each.answers for each in self.brokers.values()))
    @rule(name=BROKERS)
    def answer(self, name):
        self.cluster.answer(self.any_broker(name, lambda each: each.answers))

    @precondition(lambda self: any(each.up for each in self.brokers.values()))
    @rule(name=BROKERS)
    def break_stream(self, name):
        self.cluster.break_stream(self.any_broker(name, lambda each: each.up))

    @precondition(lambda self: any(each.late for each in self.brokers.values()))
    @rule(name=BROKERS)
    def arrive_late(self, name):
        self.brokers[self.any_broker(name, lambda each: each.late)].arrive_late()

    @rule(ms=st.sampled_from([1, 5, 60, 1_000, SEND_TIMEOUT_S * 1000]))
    def pass_time(self, ms):
        self.cluster.pass_ms(ms)

    @precondition(lambda self: self.cluster.next_ms < NEVER)
    @rule()
    def come_when_asked(self):
        self.cluster.pass_ms(self.cluster.next_ms - self.cluster.now_ms)

    @invariant()
    def nothing_is_stored_twice(self):
        counts = Counter(number for each in self.brokers.values() for number in each.stored)
        assert max(counts.values(), default=0) <= 1

    @invariant()
    def what_is_acknowledged_is_stored_where_it_says(self):
        for batch in self.cluster.done:
            if batch.error is None or batch.store_ms:
                assert self.brokers[batch.broker].stored[batch.base_offset] == batch.number

    @invariant()
    def what_was_not_sent_is_not_stored(self):
        stored = {number for each in self.brokers.values() for number in each.stored}
        for batch in self.cluster.done:
            if isinstance(batch.error, Timeout) and "not sent" in batch.error.message:
                assert batch.number not in stored

    @invariant()
    def what_was_refused_for_what_it_is_is_not_stored(self):
        stored = {number for each in self.brokers.values() for number in each.stored}
        for batch in self.cluster.done:
            if isinstance(batch.error, InvalidArgument | TooLarge) and not batch.store_ms:
                assert batch.number not in stored

    @invariant()
    def a_key_is_in_order(self):
        for broker in self.brokers.values():
            for key in ("k1", "k2", "k3"):
                numbers = [each for each in broker.stored if self.key_of[each] == key]
                assert numbers == sorted(numbers)

    @invariant()
    def what_is_accepted_and_not_done_is_counted(self):
        open_bytes = sum(each.size for each in self.batches.values() if not each.done)
        assert self.cluster.outbox.used_bytes == open_bytes

    @invariant()
    def who_is_done_is_told_once(self):
        told = [batch.number for batch in self.cluster.done]
        assert sorted(told) == sorted(n for n, batch in self.batches.items() if batch.done)

    def teardown(self):
        """With brokers that answer, all that is left in time is stored."""
        late = {n for n, each in self.batches.items() if not each.done}
        while not all(each.done for each in self.batches.values()):
            for name, broker in self.brokers.items():
                if broker.wanted and not broker.up:
                    self.cluster.connect(name)
                self.cluster.serve_all(name)
            if not all(each.done for each in self.batches.values()):
                assert self.cluster.next_ms < NEVER
                self.cluster.pass_ms(self.cluster.next_ms - self.cluster.now_ms)
        for number in late:
            error = self.batches[number].error
            # Refused for good, by an answer that was under way, or too late.
            assert error is None or isinstance(error, InvalidArgument | Timeout | TooLarge)
        for broker in self.brokers.values():
            while broker.late:
                broker.arrive_late()
        self.nothing_is_stored_twice()
        self.what_was_not_sent_is_not_stored()
        self.what_was_refused_for_what_it_is_is_not_stored()
        self.a_key_is_in_order()


TestPumpAmongBrokers = Machine.TestCase
TestPumpAmongBrokers.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
