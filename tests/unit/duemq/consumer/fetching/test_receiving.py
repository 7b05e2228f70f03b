"""Records that cannot be decoded, among others that can."""

import pytest

from duemq.consumer.fetching.receiving import received
from duemq.consumer.fetching.subscription import Filter
from duemq.errors import Corrupt
from duemq.v1 import message_pb2, view_pb2

GARBAGE = b"\x0a\x03\xff\xff\xff"  # an entry of 3 bytes that are no Record
NO_TEXT = b"\x0a\x04\x12\x02\xff\xfe"  # a message id that is no UTF-8


def entry(body: bytes) -> bytes:
    batch = message_pb2.RecordBatch(records=[message_pb2.Record(body=body)])
    return batch.SerializeToString()


def pulled(
    entries: list[bytes], offsets: list[int], counts: list[int]
) -> view_pb2.QueueRecordsView:
    return view_pb2.QueueRecordsView(
        topic="t",
        queue_id=3,
        records=b"".join(entries),
        run_offsets=offsets,
        run_counts=counts,
        run_store_ms=[100 * (number + 1) for number in range(len(offsets))],
        next_offset=offsets[-1] + counts[-1],
    )


@pytest.mark.parametrize("bad", [GARBAGE, NO_TEXT])
def test_what_is_no_record_is_passed_over(bad: bytes, caplog: pytest.LogCaptureFixture) -> None:
    large = entry(b"x" * 70_000)
    answer = pulled([entry(b"a"), bad, large, bad, entry(b"b")], [5, 20], [2, 3])
    messages = received(answer, "b1", Filter(""))
    assert [(m.offset, m.store_ms, m.body[:1]) for m in messages] == [
        (5, 100, b"a"),
        (20, 200, b"x"),
        (22, 200, b"b"),
    ]
    [line] = caplog.records
    assert line.levelname == "ERROR"
    assert "topic t, b1/3" in line.getMessage()
    assert line.getMessage().endswith("offsets 6, 21")


def test_many_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert received(pulled([GARBAGE] * 1_000, [0], [1_000]), "b1", Filter("")) == []
    [line] = caplog.records
    assert line.getMessage().endswith("8, 9, …")


@pytest.mark.parametrize(
    "entries", [[GARBAGE], [GARBAGE, b"\x0b\x00"], [GARBAGE, b"\x0a\x7fab"], [GARBAGE, b"\x0a"]]
)
def test_where_records_cannot_be_told_apart_the_queue_stops(entries: list[bytes]) -> None:
    with pytest.raises(Corrupt):
        received(pulled(entries, [0], [2]), "b1", Filter(""))
