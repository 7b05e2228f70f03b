"""Light spans of callbacks by column are those of the spans that they stand for."""

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import Status, StatusCode

from duemq.telemetry.light_spans import ProcessRows
from duemq.tracing.attributes import BroadcastId
from duemq.tracing.process_frames import Call, ProcessFrame
from tests.property.test_send_columns import RESOURCE, check_any_part, unhurried

START_NS = 1_700_000_000_123_456_789

calls = st.builds(
    Call,
    st.sampled_from(["orders", "refunds"]),
    st.sampled_from(["broker-0", "broker-1"]),
    st.integers(0, 300),
    st.sampled_from(["", "billing", "mail"]),
    st.sampled_from(["", "member-1", BroadcastId("member-1")]),
    st.just(START_NS) | st.integers(2**62, 2**62 + 5),
    st.integers(2**62 + 5, 2**63 - 1),
)
labels = st.sampled_from(["", "a", "ä" * 40])
dues = st.just(0) | st.integers(1, 2**41)
failures = st.none() | st.just(("Unavailable", Status(StatusCode.ERROR, "gone")))


@st.composite
def frames(draw):
    count = draw(st.integers(1, 5))

    def column(each):
        return [draw(each) for _ in range(count)]

    def some_ids(size):
        return draw(st.binary(min_size=size * count, max_size=size * count))

    return ProcessFrame(
        draw(calls),
        *(some_ids(size) for size in (16, 8, 8)),
        column(st.sampled_from(["m1", "m2", "m3"])),
        column(labels),
        column(labels),
        column(st.integers(0, 2**60)),
        column(st.integers(0, 2**22)),
        column(st.integers(0, 2**31 - 1)),
        column(dues),
        column(failures),
    )


@unhurried
@given(st.lists(frames(), min_size=1, max_size=4), st.data())
def test_columns_of_any_part_are_those_of_its_spans(given_frames, data):
    check_any_part(ProcessRows(given_frames, RESOURCE), data)
