"""The lane against a broker that keeps the rules: whatever is refused, nothing is lost or twice."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duemq.errors import InvariantError
from duemq.producing.batch import Batch
from duemq.producing.pumping.sequence_lane import SequenceLane


def lane(established=True):
    made = SequenceLane(1, "a", "t", 0, False)
    made.established = established
    return made


def batch(lane):
    made = Batch("t", (None, 0), {}, 0, b"", 0)
    numbers = lane.number()
    made.epoch, made.sequence = numbers.epoch, numbers.sequence
    return made


def test_batches_are_counted():
    line = lane()
    assert [batch(line).sequence for _ in range(3)] == [0, 1, 2]


def test_one_at_a_time_until_the_first_is_stored():
    line = lane(established=False)
    first = batch(line)
    assert not line.sendable
    with pytest.raises(InvariantError):
        line.number()
    line.stored(first)
    assert line.sendable


def test_a_refused_last_batch_frees_its_sequence():
    line = lane()
    line.stored(batch(line))
    line.refused(batch(line), again=False)
    assert (line.epoch, batch(line).sequence) == (0, 1)


def test_a_refused_batch_makes_those_behind_it_start_a_new_epoch():
    line = lane()
    refused, second, third = batch(line), batch(line), batch(line)
    line.refused(refused, again=False)
    assert not line.sendable
    line.out_of_sequence(second)
    line.out_of_sequence(third)
    assert (line.epoch, line.next_sequence) == (1, 0)
    assert list(line.waiting) == [second, third]


def test_a_refused_batch_that_is_sent_again_stays_in_front():
    line = lane()
    refused, second = batch(line), batch(line)
    late = Batch("t", (None, 0), {}, 0, b"", 0)
    line.waiting.append(late)
    line.refused(refused, again=True)
    line.out_of_sequence(second)
    assert list(line.waiting) == [refused, second, late]


def test_out_of_sequence_alone_starts_a_new_epoch():
    line = lane()
    only = batch(line)
    line.out_of_sequence(only)
    assert (line.epoch, list(line.waiting)) == (1, [only])


def test_a_batch_given_up_starts_a_new_epoch_when_nothing_is_behind_it():
    line = lane()
    line.lost(batch(line))
    assert line.epoch == 1


def test_doubt_reaches_the_batches_behind_and_ends_with_one_that_is_stored():
    line = lane()
    first, second, third, fourth = (batch(line) for _ in range(4))
    line.doubt(second)
    assert [line.doubtful_before(each) for each in (first, second, third)] == [False, False, True]
    line.lost(second)
    assert line.doubtful_before(fourth)
    line.stored(third)  # so the second is stored too
    assert not line.doubtful_before(fourth)


def test_a_batch_that_was_doubted_and_is_not_stored_is_numbered_anew():
    line = lane()
    first, second = batch(line), batch(line)
    line.doubt(first)
    line.out_of_sequence(first)
    assert not line.doubtful_before(second)
    line.out_of_sequence(second)
    assert (line.epoch, list(line.waiting)) == (1, [first, second])


def test_a_batch_that_was_doubted_and_is_refused_for_good_is_in_doubt_no_more():
    line = lane()
    first, second = batch(line), batch(line)
    line.doubt(first)
    line.refused(first, again=False)
    assert not line.doubtful_before(second)


def test_a_new_epoch_knows_no_doubts():
    line = lane()
    line.lost(batch(line))
    assert line.epoch == 1
    assert not line.doubtful_before(batch(line))


class BrokerLane:
    """Rules of protos/README.md, "Sends"."""

    def __init__(self):
        self.known = False
        self.epoch = self.next_sequence = 0
        self.stored = []

    def send(self, numbers, name, refuse):
        epoch, sequence = numbers
        fresh = not self.known or epoch > self.epoch
        if not fresh and epoch < self.epoch:
            return "fenced"
        if not fresh and sequence < self.next_sequence:
            return "duplicate"
        if not fresh and sequence > self.next_sequence:
            return "out of sequence"
        if refuse:
            return "refused"
        self.known, self.epoch, self.next_sequence = True, epoch, sequence + 1
        self.stored.append(name)
        return "stored"


class Machine(RuleBasedStateMachine):
    """Client lane and broker lane with a pipe between them that may break and be resent."""

    def __init__(self):
        super().__init__()
        self.lane = lane(established=False)
        self.broker = BrokerLane()
        self.unanswered = deque()  # (batch, name), in the order sent
        self.arrived = 0  # how many of them the broker has seen on this connection
        self.answers = deque()
        self.names = {}
        self.made = 0
        self.dropped = set()
        self.acknowledged = []

    @rule()
    def offer(self):
        made = Batch("t", (None, 0), {}, 0, b"", 0)
        self.names[id(made)] = (made, self.made)
        self.made += 1
        self.lane.waiting.append(made)

    @precondition(lambda self: self.lane.waiting and self.lane.sendable)
    @rule()
    def send(self):
        made = self.lane.waiting.popleft()
        numbers = self.lane.number()
        made.epoch, made.sequence = numbers.epoch, numbers.sequence
        self.unanswered.append(made)

    @precondition(lambda self: self.arrived < len(self.unanswered))
    @rule(refuse=st.sampled_from([False, False, False, True]))
    def arrive(self, refuse):
        made = self.unanswered[self.arrived]
        name = self.names[id(made)][1]
        self.answers.append(self.broker.send((made.epoch, made.sequence), name, refuse))
        self.arrived += 1

    @precondition(lambda self: self.answers)
    @rule(again=st.booleans())
    def answer(self, again):
        made, answer = self.unanswered.popleft(), self.answers.popleft()
        self.arrived -= 1
        name = self.names[id(made)][1]
        if answer in ("stored", "duplicate"):
            self.lane.stored(made)
            self.acknowledged.append(name)
        elif answer == "out of sequence":
            self.lane.out_of_sequence(made)
        else:
            assert answer == "refused", answer
            self.lane.refused(made, again=again)
            if not again:
                self.dropped.add(name)

    @rule()
    def break_and_resend(self):
        self.arrived = 0
        self.answers.clear()

    @invariant()
    def stored_once_in_order_and_only_what_was_acknowledged_is_promised(self):
        stored = self.broker.stored
        assert stored == sorted(set(stored))
        assert set(self.acknowledged) <= set(stored)
        assert not self.dropped & set(stored)

    def teardown(self):
        while self.unanswered or self.lane.waiting:
            while self.lane.waiting and self.lane.sendable:
                self.send()
            while self.arrived < len(self.unanswered):
                self.arrive(refuse=False)
            while self.answers:
                self.answer(again=False)
        assert set(self.broker.stored) == set(range(self.made)) - self.dropped
        assert self.acknowledged == [n for n in range(self.made) if n not in self.dropped]


TestLaneAgainstBroker = Machine.TestCase
TestLaneAgainstBroker.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
