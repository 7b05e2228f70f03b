import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq_server.timer_service.far.offset_bits import PAGE_BITS, Keys, OffsetBits
from duemq_server.timer_service.timers.rows import key_of

OFFSETS = st.one_of(st.integers(0, 40), st.integers(0, 5 << PAGE_BITS), st.integers(0, 1 << 47))
TIMERS = st.lists(st.builds(key_of, st.integers(0, 3), OFFSETS), unique=True, max_size=30)


def keys(*numbers: int) -> Keys:
    return np.array(numbers, dtype=np.uint64)


@given(st.lists(st.tuples(TIMERS, st.lists(st.booleans(), min_size=90, max_size=90)), max_size=6))
def test_it_is_a_set(steps: list[tuple[list[int], list[bool]]]) -> None:
    bits, model = OffsetBits(), set[int]()
    for added, goes in steps:
        bits.add(keys(*added))
        model |= set(added)
        assert sorted(bits.keys().tolist()) == sorted(model)
        gone = [key for key, go in zip(sorted(model), goes, strict=False) if go]
        bits.take(keys(*gone))
        model -= set(gone)
        asked = sorted({*added, *gone, *(key + 1 for key in added)})
        assert bits.find(keys(*asked)).tolist() == [key in model for key in asked]
        assert [bits.has(key >> 48, key & (1 << 48) - 1) for key in asked] == [
            key in model for key in asked
        ]
        assert len(bits) == len(model)
        copy = OffsetBits()
        copy.restore(*bits.saved())
        assert sorted(copy.keys().tolist()) == sorted(model)
        assert len(copy) == len(model)


@pytest.mark.parametrize("rounds", [3])
def test_pages_that_are_empty_are_used_again(rounds: int) -> None:
    bits = OffsetBits()
    sizes = []
    for n in range(rounds):
        page = np.arange(64, dtype=np.uint64) + np.uint64(64 * n)
        added = (page << np.uint64(PAGE_BITS)) + np.uint64(7)
        bits.add(added)
        sizes.append(len(bits.saved()[0]))
        bits.take(added)
        assert len(bits.saved()[0]) == 0
    assert sizes == [64] * rounds
    assert len(bits._bits) == 64


def test_thousands_at_once_are_what_they_are_one_by_one() -> None:
    rng = np.random.default_rng(1)
    every = rng.permutation(np.arange(0, 40 << PAGE_BITS, 3).astype(np.uint64))
    bits, model = OffsetBits(), OffsetBits()
    bits.add(every[:5_000])
    for key in every[:5_000]:
        model.add(keys(key))
    bits.take(every[:2_000])

    assert bits.find(every).tolist() == [False] * 2_000 + [True] * 3_000 + [False] * (
        len(every) - 5_000
    )
    assert [model.has(0, int(key)) for key in every] == [True] * 5_000 + [False] * (
        len(every) - 5_000
    )
    assert len(bits) == 3_000
    assert len(model) == 5_000
