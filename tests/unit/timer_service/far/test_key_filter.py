import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from duemq_server.timer_service.far.key_filter import KeyFilter


def random_hashes(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1 << 64, count, dtype=np.uint64)


class Filter(RuleBasedStateMachine):
    """No block that has a key is ever missing."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = KeyFilter()
        self.blocks: dict[int, np.ndarray] = {}
        self.unknown: set[int] = set()
        self.number = 0

    @rule(count=st.sampled_from([1, 3, 200, 4_096]), times=st.integers(1, 12))
    def add(self, count: int, times: int) -> None:
        for _ in range(times):
            self.blocks[self.number] = random_hashes(self.number, count)
            self.filter.add(self.number, self.blocks[self.number])
            self.number += 1

    @rule(readable=st.booleans())
    def learn(self, readable: bool) -> None:
        self.blocks[self.number] = random_hashes(self.number, 5)
        self.filter.add(self.number, None)
        assert self.filter.unknown == {self.number}
        self.filter.learn({self.number: self.blocks[self.number] if readable else None})
        assert not self.filter.unknown
        self.number += 1

    @precondition(lambda self: self.blocks)
    @rule(which=st.floats(0, 1, exclude_max=True))
    def remove(self, which: float) -> None:
        number = list(self.blocks)[int(which * len(self.blocks))]
        del self.blocks[number]
        self.filter.remove(number)

    @rule()
    def look(self) -> None:
        assert len(self.filter) == len(self.blocks)
        asked = [(number, hashes[-1]) for number, hashes in self.blocks.items()]
        found = self.filter.candidates(np.array([each for _, each in asked], dtype=np.uint64))
        for (number, _), candidates in zip(asked, found, strict=True):
            assert number in candidates
            assert candidates <= self.blocks.keys()


TestFilter = Filter.TestCase
TestFilter.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_of_ten_thousand_filters_hardly_one_is_wrong() -> None:
    known = KeyFilter()
    for number in range(400):
        known.add(number, random_hashes(number, 409))  # just fits 8,192 rows

    found = known.candidates(random_hashes(9_999, 2_000))

    assert sum(map(len, found)) < 400 * 2_000 * 1.2e-4


def test_a_block_that_is_done_while_it_is_learnt_stays_out() -> None:
    known = KeyFilter()
    known.add(1, None)
    known.remove(1)

    known.learn({1: random_hashes(1, 3)})

    assert len(known) == 0
