import pytest

from duemq.errors import Corrupt, OffsetOutOfRange
from duemq.v1.broker_pb2 import QueueRecords
from duemq.v1.message_pb2 import Record
from duemq_analytics.source.client import runs


def answer(*found):
    records = QueueRecords()
    for offset, count in found:
        records.run_offsets.append(offset)
        records.run_counts.append(count)
        records.run_store_ms.append(1)
        records.records.records.extend(Record(attempt=offset + i) for i in range(count))
    return records


def offsets(found):
    return [(run.offset, [record.attempt for record in run.records]) for run in found]


def test_runs_are_cut_at_the_end_of_the_range():
    assert offsets(runs(answer((5, 3), (8, 2)), 5, 9)) == [(5, [5, 6, 7]), (8, [8])]
    assert offsets(runs(answer((5, 3), (8, 2)), 5, 8)) == [(5, [5, 6, 7])]


def test_a_gap_is_data_loss_not_fewer_rows():
    with pytest.raises(OffsetOutOfRange, match="offset 4 was asked for and 5 came"):
        list(runs(answer((5, 3)), 4, 9))
    with pytest.raises(OffsetOutOfRange, match="offset 8 was asked for and 9 came"):
        list(runs(answer((5, 3), (9, 1)), 5, 10))


def test_on_request_a_gap_is_stepped_over_with_a_warning(caplog):
    assert offsets(runs(answer((5, 3), (9, 1)), 4, 10, fail_on_data_loss=False)) == [
        (5, [5, 6, 7]),
        (9, [9]),
    ]
    assert "offset 4 was asked for and 5 came" in caplog.text
    assert "offset 8 was asked for and 9 came" in caplog.text


def test_an_answer_that_does_not_add_up_is_refused():
    wrong = answer((5, 3))
    wrong.run_counts[0] = 2
    with pytest.raises(Corrupt):
        list(runs(wrong, 5, 9))
