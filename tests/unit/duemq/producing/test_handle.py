import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import InvalidArgument
from duemq.producing import handle

GOLDEN = "dmq1CQEAAAAAAADwEAMY0gkggPDEoow0d7uADA"


def test_golden():
    """Handles are kept by applications: this text must decode for ever."""
    assert handle.encode(0xF000000000000001, 3, 1234, 1_790_000_052_224) == GOLDEN
    decoded = handle.decode(GOLDEN)
    assert (decoded.store_id, decoded.queue_id) == (0xF000000000000001, 3)
    assert (decoded.offset, decoded.due_ms) == (1234, 1_790_000_052_224)


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
)
def test_round_trip(store_id, queue_id, offset, due_ms):
    decoded = handle.decode(handle.encode(store_id, queue_id, offset, due_ms))
    assert (decoded.store_id, decoded.queue_id) == (store_id, queue_id)
    assert (decoded.offset, decoded.due_ms) == (offset, due_ms)


@given(st.text(max_size=60) | st.text(max_size=60).map(lambda text: "dmq1" + text))
def test_anything_else_is_refused(text):
    with pytest.raises(InvalidArgument) as raised:
        handle.decode(text)
    assert raised.value.field == "handle"


@given(
    st.integers(4, len(GOLDEN) - 1), st.sampled_from(string.ascii_letters + string.digits + "-_")
)
def test_a_mistyped_character_is_noticed(position, character):
    """Also the last one, of which some bits are in no byte that the checksum is of."""
    mistyped = GOLDEN[:position] + character + GOLDEN[position + 1 :]
    if mistyped != GOLDEN:
        with pytest.raises(InvalidArgument):
            handle.decode(mistyped)


@pytest.mark.parametrize("last", string.ascii_letters + string.digits + "-_")
def test_a_handle_has_one_text(last):
    text = GOLDEN[:-1] + last
    if text != GOLDEN:
        with pytest.raises(InvalidArgument):
            handle.decode(text)


@pytest.mark.parametrize("wrong", [None, 5, b"dmq1", GOLDEN + "A" * 200, GOLDEN[:-1], "dmq1"])
def test_wrong_types_and_lengths(wrong):
    with pytest.raises(InvalidArgument):
        handle.decode(wrong)


@pytest.mark.parametrize("wrong", [None, 5, GOLDEN, {GOLDEN}, [None], [GOLDEN, 5]])
def test_what_is_no_list_of_handles(wrong):
    with pytest.raises(InvalidArgument) as raised:
        handle.decode_all(wrong)
    assert raised.value.field == "handle"
