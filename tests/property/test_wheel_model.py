"""The wheel against a sorted list."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duemq_server.timer_service.timers.wheel import SPAN_MS, Wheel

START_MS = 1_700_000_000_000


class WheelModel(RuleBasedStateMachine):
    """The model holds (due, number) of every timer that did not come out."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = START_MS
        self.wheel = Wheel(START_MS)
        self.pending: dict[int, int] = {}
        self.number = 0

    @rule(
        waits=st.lists(
            st.one_of(st.integers(-50, 50), st.integers(0, SPAN_MS - 2)), min_size=1, max_size=40
        )
    )
    def add(self, waits: list[int]) -> None:
        due_ms = [min(self.now_ms + wait, self.wheel.horizon_ms - 1) for wait in waits]
        numbers = range(self.number, self.number + len(due_ms))
        self.number += len(due_ms)
        self.pending.update(zip(numbers, due_ms, strict=True))
        self.wheel.add(np.array(numbers, dtype=np.int32), np.array(due_ms, dtype=np.int64))

    @rule(
        passed=st.one_of(st.integers(-100, 100), st.integers(0, 3 * SPAN_MS)),
        limit=st.sampled_from([1, 3, 10, 1_000]),
    )
    def advance(self, passed: int, limit: int) -> None:
        self.now_ms += passed
        due = sorted(due for due in self.pending.values() if due <= self.now_ms)
        taken = self.wheel.advance(self.now_ms, limit).tolist()

        assert len(taken) <= limit
        dues = [self.pending.pop(number) for number in taken]
        assert all(each <= self.now_ms for each in dues)
        if due:
            assert taken
        while taken:
            taken = self.wheel.advance(self.now_ms, limit).tolist()
            dues += [self.pending.pop(number) for number in taken]
        assert sorted(dues) == due

    @rule(keep=st.floats(0, 1))
    def replace(self, keep: float) -> None:
        kept = dict(list(self.pending.items())[: int(keep * len(self.pending))])
        self.wheel.replace(
            np.array(list(kept), dtype=np.int32), np.array(list(kept.values()), dtype=np.int64)
        )
        self.pending = kept

    @invariant()
    def it_says_when_the_next_is_due(self) -> None:
        assert len(self.wheel) == len(self.pending)
        assert self.wheel.next_due_ms() == min(self.pending.values(), default=None)


TestWheel = WheelModel.TestCase
TestWheel.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
