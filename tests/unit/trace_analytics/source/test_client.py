import pytest

from duemq.errors import Corrupt, OffsetOutOfRange, PartialAnswer, TopicNotFound
from duemq.v1.broker_pb2 import QueueRecords
from duemq.v1.message_pb2 import Record
from duemq.v1.nameserver_pb2 import BrokerInstance, RouteUpdate
from duemq_analytics.options import Options
from duemq_analytics.source.client import QueueClient, runs
from duemq_analytics.source.plan import QueueBounds, QueueRange

THERE, AWAY = (BrokerInstance(name=name, address="h:1") for name in ("b0", "b1"))


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


class Overtaken(QueueClient):
    """Of a cluster that is not there: its queue's records 0 to 9 are, but those `gone`."""

    def __init__(self, gone):
        super().__init__(("127.0.0.1:1",), timeout_s=1)
        self.gone = gone

    def _pull(self, topic, wanted, offset, records, broker):
        if offset < self.gone:
            raise OffsetOutOfRange(f"offset: {offset} is not kept", field="offset")
        found = answer((offset, records or 4))
        found.next_offset = offset + (records or 4)
        return found

    def _bounds(self, topic, broker):
        return [QueueBounds(broker.name, "h:1", queue, self.gone, 10) for queue in (0, 1)]


@pytest.mark.parametrize(("gone", "read"), [(3, [3, 7]), (9, [9]), (10, []), (12, [])])
def test_what_retention_was_faster_with_ends_a_read_or_is_passed_over(gone, read, caplog):
    wanted = QueueRange("b", "h:1", 1, 2, 10)
    with Overtaken(gone) as client:
        with pytest.raises(OffsetOutOfRange, match="2 is not kept"):
            list(client.read("t", wanted))
        found = list(client.read("t", wanted, fail_on_data_loss=False))
    assert [run.offset for run in found] == read
    assert f"2 is not kept; going on with offset {gone}" in caplog.text


def test_an_offset_that_is_there_and_is_not_given_ends_a_read(monkeypatch):
    with Overtaken(5) as client:
        monkeypatch.setattr(client, "_bounds", lambda *_: [QueueBounds("b", "h:1", 1, 2, 10)])
        with pytest.raises(OffsetOutOfRange, match="2 is not kept"):
            list(client.read("t", QueueRange("b", "h:1", 1, 2, 10), fail_on_data_loss=False))


def test_what_is_gone_by_now_is_older_than_any_moment():
    queue = QueueBounds("b", "h:1", 1, 0, 10)
    with Overtaken(6) as client:
        assert client.starts_since("t", [queue], since_ms=1) == {"b": {"1": 6}}


def test_where_a_log_has_lost_its_end_nothing_in_front_of_it_is_passed_over(monkeypatch):
    queue = QueueBounds("b", "h:1", 1, 0, 10)
    with Overtaken(0) as client:
        pull = client._pull
        monkeypatch.setattr(
            client, "_pull", lambda *a, **k: pull(*a, **k) if a[2] < 4 else QueueRecords()
        )
        assert client.starts_since("t", [queue], since_ms=1) == {"b": {"1": 0}}
        assert client.starts_since("t", [queue], since_ms=2) == {"b": {"1": 4}}


@pytest.mark.parametrize(
    ("update", "error"),
    [
        (RouteUpdate(whole=True), PartialAnswer),
        (RouteUpdate(whole=True, brokers=[THERE], lost_brokers=[AWAY]), PartialAnswer),
        (RouteUpdate(whole=True, brokers=[THERE]), TopicNotFound),
    ],
)
def test_a_topic_whose_brokers_may_all_be_away_is_not_taken_for_a_deleted_one(
    monkeypatch, update, error
):
    with QueueClient(("127.0.0.1:1",), timeout_s=0) as client:
        monkeypatch.setattr(client._client, "first", lambda *_: update)
        with pytest.raises(error):
            client.queues(Options("t", fail_on_data_loss=False))
