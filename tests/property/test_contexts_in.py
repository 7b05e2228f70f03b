"""Contexts that are found in a frame without decoding it are those that its records carry."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duemq.tracing.contexts import (
    LINKS_MAX,
    TRACEPARENT,
    extract,
    is_sampled,
    usual_ids,
)
from duemq.v1.message_pb2 import Record, RecordBatch
from duemq_server.serving.tracing.encoded_contexts import contexts_in

# Generating frames takes long where the machine is busy; that says nothing about them.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.builds(
    "{}-{:032x}-{:016x}-{}".format,
    st.sampled_from(["00", "cc"]),
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.sampled_from(["01", "01", "01", "00", "03", "01-more"]),
)
bodies = st.sampled_from([b"", b"x" * 5, b"x" * 200, b"\x0a\x05" * 70])


@st.composite
def runs(draw):
    """Records of one form, as `send_many` makes them, or with an odd one among them."""
    count = draw(st.sampled_from([1, 2, 15, 16, 17, 40]))
    body, text = draw(bodies), draw(st.none() | texts)
    others = {"a": "b"} if draw(st.booleans()) else {}
    made = []
    for number in range(count):
        own = text and text[:3] + f"{number + 1:032x}" + text[35:]
        properties = others | ({TRACEPARENT: own} if own else {})
        made.append(Record(body=body, message_id=f"{number:028}", properties=properties))
    if draw(st.booleans()):
        odd = draw(st.none() | texts)
        made[draw(st.integers(0, count - 1))].properties.update({TRACEPARENT: odd} if odd else {})
    return made


@unhurried
@given(st.lists(runs(), min_size=1, max_size=4), st.data())
def test_of_any_records_of_a_frame(given_runs, data):
    records = [record for run in given_runs for record in run]
    encoded = [RecordBatch(records=[record]).SerializeToString() for record in records]
    first = data.draw(st.integers(0, len(records) - 1))
    past = data.draw(st.integers(first + 1, len(records)))
    start, end = sum(map(len, encoded[:first])), sum(map(len, encoded[:past]))
    carried = [record.properties.get(TRACEPARENT, "") for record in records[first:past]]
    sampled = [text for text in carried if is_sampled(text)]
    found = contexts_in(b"".join(encoded), start=start, end=end)
    assert (found.texts, found.count) == (sampled[:LINKS_MAX], len(sampled))


# Most are as we write them; of the others, each differs in a place.
flawed = st.builds(
    lambda text, place, sign: text[:place] + sign + text[place + 1 :],
    st.just("00-" + "1a" * 16 + "-" + "2b" * 8 + "-01"),
    st.integers(0, 55),
    st.sampled_from("0A g-\n\u00b5\u0661"),
)
zeros = st.sampled_from(["00-" + "0" * 32 + "-" + "1" * 16, "00-" + "1" * 32 + "-" + "0" * 16])


@unhurried
@given(st.lists(texts | flawed | zeros.map("{}-01".format), max_size=5))
def test_ids_of_usual_texts_are_those_that_the_library_reads(given_texts):
    found = usual_ids(given_texts)
    contexts = [extract({TRACEPARENT: text}) for text in given_texts]
    if found is None:
        return
    assert all(context is not None and context.trace_flags.sampled for context in contexts)
    trace_ids = b"".join(context.trace_id.to_bytes(16, "big") for context in contexts)
    span_ids = b"".join(context.span_id.to_bytes(8, "big") for context in contexts)
    assert found == (trace_ids, span_ids)


long_ids = st.builds(
    "00-{:032x}-{:016x}-01".format, st.integers(2**127, 2**128 - 1), st.integers(2**63, 2**64 - 1)
)


@unhurried
@given(st.lists(long_ids, min_size=1, max_size=5))
def test_what_we_write_is_usual(given_texts):
    assert usual_ids(given_texts) is not None
