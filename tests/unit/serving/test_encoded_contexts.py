import pytest

from duemq.tracing.contexts import LINKS_MAX, TRACEPARENT, FoundContexts, extract
from duemq.v1.message_pb2 import Record, RecordBatch
from duemq_server.serving.tracing.encoded_contexts import contexts_in

IDS = "1" * 32 + "-" + "2" * 16


def encoded(*properties):
    batch = RecordBatch(records=[Record(body=b"x" * 40, properties=p) for p in properties])
    return batch.SerializeToString()


def test_links_are_bounded_and_what_is_sampled_is_counted():
    sampled, refused = {TRACEPARENT: f"00-{IDS}-01"}, {TRACEPARENT: f"00-{IDS}-00"}
    found = contexts_in(encoded(*[sampled] * 100, {"a": "b"}))
    assert (len(found.texts), found.count) == (LINKS_MAX, 100)
    assert contexts_in(encoded(*[refused] * 1_000, sampled)).count == 1
    assert contexts_in(encoded(sampled)[:-1]) == FoundContexts()


def test_contexts_come_in_the_order_of_the_messages():
    texts = [f"00-{number:032x}-{number:016x}-01" for number in range(1, 50)]
    found = contexts_in(encoded(*[{TRACEPARENT: text} for text in texts]))
    assert found.texts == texts[:LINKS_MAX]
    assert [context.span_id for context in found.sampled] == list(range(1, LINKS_MAX + 1))


def test_a_run_of_one_size_is_counted_by_what_each_record_carries():
    texts = [f"00-{number:032x}-{number:016x}-01" for number in range(1, 41)]
    assert contexts_in(encoded(*[{TRACEPARENT: text} for text in texts])).count == 40
    texts[20] = texts[20][:-1] + "0"
    assert contexts_in(encoded(*[{TRACEPARENT: text} for text in texts])).count == 39
    # Records of one size, of which one has another property there.
    assert contexts_in(encoded(*[{TRACEPARENT: texts[0]}] * 30, {"a" * 11: texts[1]})).count == 30
    # Two that are together as large as one of the others.
    one, small = Record(body=b"x" * 202), Record(body=b"x" * 63)
    one.properties[TRACEPARENT] = small.properties[TRACEPARENT] = texts[0]
    assert RecordBatch(records=[one]).ByteSize() == RecordBatch(records=[small] * 2).ByteSize()
    batch = RecordBatch(records=[one] * 20 + [small] * 2 + [one] * 20)
    assert contexts_in(batch.SerializeToString()).count == 42


def test_only_a_part_of_the_records_is_looked_at():
    one = encoded({TRACEPARENT: f"00-{IDS}-01"})
    records = memoryview(one * 3)
    assert contexts_in(records, start=len(one), end=2 * len(one)).count == 1
    assert contexts_in(records, start=len(one) + 50, end=2 * len(one)).count == 0


@pytest.mark.parametrize("form", ["00-{}", " 00-{}", "00-{} ", "01-{}", "cc-{}-what-will-be"])
def test_whatever_the_standard_allows_is_found_in_a_frame_too(form):
    properties = {TRACEPARENT: form.format(f"{IDS}-01")}
    context = extract(properties)
    assert context.span_id == int("2" * 16, 16)
    found = contexts_in(encoded(properties))
    assert (list(found.sampled), found.count) == ([context], 1)
    assert contexts_in(encoded({TRACEPARENT: form.format(f"{IDS}-02")})) == FoundContexts()


@pytest.mark.parametrize(
    "text",
    ["", f"ff-{IDS}-01", f"00-{IDS}-01-x", "00-" + "G" * 32 + "-" + "1" * 16 + "-01", "00-01"],
)
def test_what_is_malformed_has_no_context(text):
    assert list(contexts_in(encoded({TRACEPARENT: text})).sampled) == []
