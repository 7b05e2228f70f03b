from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.record_bytes import varint
from duemq.v1 import broker_pb2, error_pb2, message_pb2, view_pb2
from duemq_server.broker.reading.pull_encoding import QueueAnswer, encode
from duemq_server.broker.reading.selection import FrameRun


def test_the_bytes_are_those_of_the_generated_message() -> None:
    records = message_pb2.RecordBatch(
        records=[message_pb2.Record(body=b"x" * 200), message_pb2.Record(body=b"y")]
    )
    data = records.SerializeToString()
    head = broker_pb2.PullResponse(request_id=300)
    head.commits.add(topic="orders", offset=4)
    error = error_pb2.Error(code=error_pb2.TOPIC_NOT_FOUND, message="none")
    encoded = encode(
        head.SerializeToString(),
        [
            QueueAnswer(
                "orders",
                3,
                [memoryview(data)[:50], memoryview(data)[50:]],
                len(data),
                [FrameRun(5, 1, 0, 0, 0, 1_000), FrameRun(200, 1, 0, 0, 0, 2_000)],
                201,
                1,
                1 << 40,
                untraced=True,
            ),
            QueueAnswer("none", 0, error=error.SerializeToString()),
        ],
    )
    head.queues.add(
        topic="orders",
        queue_id=3,
        records=records,
        run_offsets=[5, 200],
        run_counts=[1, 1],
        run_store_ms=[1_000, 2_000],
        next_offset=201,
        min_offset=1,
        max_offset=1 << 40,
        untraced=True,
    )
    head.queues.add(topic="none", error=error)
    assert broker_pb2.PullResponse.FromString(encoded) == head
    view = view_pb2.PullResponseView.FromString(encoded)
    assert view.queues[0].records == data


@given(st.integers(0, 2**63 - 1))
def test_varints_are_protobufs(value: int) -> None:
    message = broker_pb2.OffsetResult(offset=value)
    expected = b"\x20" + varint(value) if value else b""
    assert message.SerializeToString() == expected
