"""The views of the hot path and the messages of the contract are two readings of the same bytes."""

import struct

import pytest

from duemq.v1 import broker_pb2, error_pb2, message_pb2, view_pb2

RECORDS = message_pb2.RecordBatch(
    records=[message_pb2.Record(body=b"x" * 300, message_id="1", key="k"), message_pb2.Record()]
)
BATCH = broker_pb2.Batch(
    topic="t",
    queue_id=-1,
    producer_id=1 << 63,
    producer_epoch=7,
    sequence=9,
    records=RECORDS,
    sizes=[310, 2],
    tag_hashes=[1, 0],
    key_hashes=[0, 2**32 - 1],
    delays_ms=[5],
    due_ms=[-1, 2],
    delay_levels=[18],
)
RESULT = broker_pb2.BatchResult(
    error=error_pb2.Error(code=2, message="m"),
    queue_id=3,
    base_offset=4,
    store_ms=5,
    duplicate=True,
    due_ms=[1, 2],
)
QUEUE = broker_pb2.QueueRecords(
    topic="t",
    queue_id=3,
    error=error_pb2.Error(code=1),
    records=RECORDS,
    run_offsets=[1, 300],
    run_counts=[1, 2],
    run_store_ms=[5, 6],
    next_offset=7,
    min_offset=8,
    max_offset=9,
)
PAIRS = [
    (broker_pb2.SendRequest(request_id=1, batches=[BATCH]), view_pb2.SendRequestView),
    (
        broker_pb2.SendResponse(request_id=1, results=[RESULT], broker="b", store_id=2**64 - 1),
        view_pb2.SendResponseView,
    ),
    (
        broker_pb2.PullResponse(
            request_id=1, queues=[QUEUE], commits=[broker_pb2.OffsetResult(topic="t", offset=-1)]
        ),
        view_pb2.PullResponseView,
    ),
]


@pytest.mark.parametrize(("message", "view"), PAIRS, ids=lambda one: type(one).__name__)
def test_a_view_reads_and_writes_the_same_bytes(message, view):
    read = view.FromString(message.SerializeToString())
    assert type(message).FromString(read.SerializeToString()) == message


def test_every_field_of_a_view_has_the_number_of_its_twin():
    for name, view in view_pb2.DESCRIPTOR.message_types_by_name.items():
        twin = broker_pb2.DESCRIPTOR.message_types_by_name[name.removesuffix("View")]
        assert {f.name: f.number for f in view.fields} == {f.name: f.number for f in twin.fields}


def test_packed_arrays_and_records_are_plain_bytes_in_a_view():
    batch = view_pb2.BatchView.FromString(BATCH.SerializeToString())
    assert batch.sizes == struct.pack("<2I", 310, 2)
    assert batch.due_ms == struct.pack("<2q", -1, 2)
    assert batch.records == RECORDS.SerializeToString()
