"""Handles in columns are the list that they were made of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq_server.timer_service.timers.handles import Handles
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId

NUMBERS = st.integers(0, (1 << 63) - 1)
SOURCES = st.builds(SourceId, st.integers(0, (1 << 64) - 1), st.integers(0, 3))
LISTS = st.lists(st.builds(Cancelled, SOURCES, NUMBERS, NUMBERS), max_size=8)


@given(LISTS, st.integers(0, 8), st.integers(0, 8))
def test_they_are_a_list(listed: list[Cancelled], start: int, end: int) -> None:
    handles = Handles.of(listed)

    assert list(handles) == listed
    assert list(handles[start:end]) == listed[start:end]
    assert Handles.of(handles) is handles
    with pytest.raises(IndexError):
        handles[len(listed)]


@given(st.lists(LISTS, min_size=1, max_size=4))
def test_lists_are_joined(parts: list[list[Cancelled]]) -> None:
    joined = Handles.joined([Handles.of(part) for part in parts])

    assert list(joined) == [each for part in parts for each in part]
    assert len(set(joined.sources)) == len(joined.sources)
