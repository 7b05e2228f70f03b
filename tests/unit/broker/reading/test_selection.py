import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import InvalidArgument
from duemq.protocol.record_bytes import text_hash
from duemq_server.broker.filtering.filters import parse_filter
from duemq_server.broker.reading.selection import (
    VECTOR_ENTRIES_MIN,
    Selection,
    frames_of,
    select,
)
from duemq_server.storage.indexes import consume_queue

OFFSET = 1_000

# Frames of records: (size, tag) of each, and the gap to the frame before.
frames_strategy = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(2, 60), st.sampled_from([0, 1, 2])), min_size=1, max_size=12
        ),
        st.integers(0, 3),
    ),
    max_size=25,
)


def page_of(frames: list[tuple[list[tuple[int, int]], int]]) -> memoryview:
    entries = bytearray()
    position = 0
    for number, (records, gap) in enumerate(frames):
        position += gap * 1_000
        back = 100
        for size, tag in records:
            entries += consume_queue.ENTRY.pack(position + back, size, back, tag, 0, number)
            back += size
        position += back + 8
    return memoryview(bytes(entries))


def naive(
    page: memoryview, records_max: int, bytes_max: int, wanted: frozenset[int] | None
) -> list[int]:
    """Offsets that a pull must get at most, one by one."""
    chosen, taken = [], 0
    for index, entry in enumerate(consume_queue.ENTRY.iter_unpack(page)):
        if wanted is not None and entry[3] not in wanted:
            continue
        if chosen and (len(chosen) >= records_max or taken + entry[1] > bytes_max):
            break
        chosen.append(index)
        taken += entry[1]
    return chosen


def offsets_of(selection: Selection) -> list[int]:
    return [run.offset + n for run in selection.runs for n in range(run.records)]


@given(
    frames_strategy,
    st.integers(1, 80),
    st.integers(1, 3_000),
    st.sampled_from([None, frozenset({1}), frozenset({0, 2})]),
)
def test_a_selection_is_a_prefix_of_what_matches_cut_between_frames(
    frames: list, records_max: int, bytes_max: int, wanted: frozenset[int] | None
) -> None:
    page = page_of(frames)
    selection = select(page, OFFSET, records_max, bytes_max, wanted)
    entries = list(consume_queue.ENTRY.iter_unpack(page))
    expected = [OFFSET + index for index in naive(page, records_max, bytes_max, wanted)]
    got = offsets_of(selection)
    assert got == expected[: len(got)]
    assert selection.records == len(got)
    assert selection.bytes == sum(entries[offset - OFFSET][1] for offset in got)
    # Nothing that matches lies between what was given and where to go on.
    skipped = range(got[-1] + 1 if got else OFFSET, selection.next_offset)
    assert all(wanted is not None and entries[o - OFFSET][3] not in wanted for o in skipped)
    if len(got) < len(expected):  # cut earlier only to keep a frame whole
        frame = [e[0] - e[2] for e in entries]
        assert frame[expected[len(got)] - OFFSET] == frame[selection.next_offset - OFFSET]
        assert got
        assert frame[got[-1] - OFFSET] != frame[selection.next_offset - OFFSET]


@given(
    frames_strategy,
    st.integers(1, 80),
    st.integers(1, 3_000),
    st.sampled_from([None, frozenset({1}), frozenset({9})]),
    st.booleans(),
)
def test_the_loop_and_numpy_select_the_same(
    frames: list, records_max: int, bytes_max: int, wanted: frozenset[int] | None, at_least: bool
) -> None:
    from duemq_server.broker.reading import selection

    page = page_of(frames)
    if not page:
        return
    arguments = (OFFSET, records_max, bytes_max, wanted, at_least)
    entries = list(consume_queue.ENTRY.iter_unpack(page))
    assert selection._select_loop(entries, *arguments) == selection._select_vector(page, *arguments)


@given(frames_strategy)
def test_runs_are_contiguous_pieces_of_one_frame(frames: list) -> None:
    page = page_of(frames)
    entries = list(consume_queue.ENTRY.iter_unpack(page))
    selection = select(page, OFFSET, 10_000, 1_000_000, None)
    for run in selection.runs:
        rows = entries[run.offset - OFFSET : run.offset - OFFSET + run.records]
        assert run.start == rows[0][0]
        assert run.end == rows[-1][0] + rows[-1][1]
        assert {row[0] - row[2] for row in rows} == {run.frame}
        assert {row[5] for row in rows} == {run.store_ms}
    assert len(frames_of(selection.runs)) == len(selection.runs) == len(frames)


@pytest.mark.parametrize("count", [3, VECTOR_ENTRIES_MIN])
def test_a_first_record_beyond_the_bytes_comes_only_if_it_must(count: int) -> None:
    page = page_of([([(50, 0)] * count, 0)])
    assert select(page, OFFSET, 10, 10, None).records == 1
    nothing = select(page, OFFSET, 10, 10, None, at_least_one=False)
    assert (nothing.records, nothing.next_offset) == (0, OFFSET)


def test_filters() -> None:
    assert parse_filter("") is None
    assert parse_filter("*") is None
    assert parse_filter("a || *") is None
    assert parse_filter("  ") is None, "as consumers understand it"
    assert parse_filter("a||b c") == {text_hash(b"a"), text_hash(b"b c")}
    for wrong in ("||", "a ||", "a || || b", "a" * 5_000):
        with pytest.raises(InvalidArgument) as caught:
            parse_filter(wrong)
        assert caught.value.field == "filter"
    with pytest.raises(InvalidArgument, match="5000 characters, at most 4096"):
        parse_filter("a" * 5_000)
