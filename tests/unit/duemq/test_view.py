"""view.proto is the hot path's messages once more: the same bytes either way."""

import pytest
from google.protobuf.descriptor import FieldDescriptor

from duemq.v1 import broker_pb2, error_pb2, message_pb2, view_pb2

PAIRS = [
    (broker_pb2.Batch, view_pb2.BatchView),
    (broker_pb2.SendRequest, view_pb2.SendRequestView),
    (broker_pb2.BatchResult, view_pb2.BatchResultView),
    (broker_pb2.SendResponse, view_pb2.SendResponseView),
    (broker_pb2.QueueRecords, view_pb2.QueueRecordsView),
    (broker_pb2.PullResponse, view_pb2.PullResponseView),
]
RECORDS = message_pb2.RecordBatch(
    records=[
        message_pb2.Record(body=b"one", message_id="a", properties={"x": "y"}),
        message_pb2.Record(body=b"two", message_id="b", tag="t", due_ms=5),
    ]
)
ERROR = error_pb2.Error(code=error_pb2.TOO_LARGE, message="m", field="f", value="v", limit="l")
BATCH = broker_pb2.Batch(
    topic="t",
    queue_id=-1,
    producer_id=2**62,
    producer_epoch=3,
    sequence=4,
    records=RECORDS,
    sizes=[10, 2**32 - 1],
    tag_hashes=[0, 1],
    key_hashes=[2, 3],
    delays_ms=[-1, 2**40],
    due_ms=[7],
    delay_levels=[1, 2],
)
RESULT = broker_pb2.BatchResult(
    error=ERROR, queue_id=1, base_offset=2**40, store_ms=5, duplicate=True, due_ms=[1, -2]
)
EXAMPLES = [
    (BATCH, view_pb2.BatchView),
    (broker_pb2.SendRequest(request_id=9, batches=[BATCH, BATCH]), view_pb2.SendRequestView),
    (RESULT, view_pb2.BatchResultView),
    (
        broker_pb2.SendResponse(request_id=9, results=[RESULT], broker="b", store_id=2**63),
        view_pb2.SendResponseView,
    ),
    (
        broker_pb2.PullResponse(
            request_id=9,
            queues=[
                broker_pb2.QueueRecords(
                    topic="t",
                    queue_id=1,
                    error=ERROR,
                    records=RECORDS,
                    run_offsets=[5],
                    run_counts=[2],
                    run_store_ms=[6],
                    next_offset=7,
                    min_offset=1,
                    max_offset=9,
                )
            ],
            commits=[broker_pb2.OffsetResult(topic="t", offset=-1)],
        ),
        view_pb2.PullResponseView,
    ),
]


@pytest.mark.parametrize(("public", "view"), PAIRS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_same_fields_by_number_and_name(public, view):
    ours = {(f.number, f.name) for f in view.DESCRIPTOR.fields}
    theirs = {(f.number, f.name) for f in public.DESCRIPTOR.fields}
    assert ours == theirs


@pytest.mark.parametrize(("public", "view"), PAIRS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_only_nested_messages_and_packed_arrays_became_bytes(public, view):
    views = {other.DESCRIPTOR.name for _, other in PAIRS}
    for field in view.DESCRIPTOR.fields:
        other = public.DESCRIPTOR.fields_by_number[field.number]
        if field.type == FieldDescriptor.TYPE_BYTES:
            is_records = other.type == FieldDescriptor.TYPE_MESSAGE
            assert is_records or (other.is_repeated and other.is_packed)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.name in views:
            assert field.message_type.name == other.message_type.name + "View"
        else:
            assert field.type == other.type
        assert field.is_repeated == other.is_repeated or field.type == FieldDescriptor.TYPE_BYTES


@pytest.mark.parametrize(("message", "view"), EXAMPLES, ids=lambda x: getattr(x, "__name__", ""))
def test_same_bytes_both_ways(message, view):
    encoded = message.SerializeToString(deterministic=True)
    viewed = view.FromString(encoded)
    assert viewed.SerializeToString(deterministic=True) == encoded
    assert type(message).FromString(viewed.SerializeToString()) == message
