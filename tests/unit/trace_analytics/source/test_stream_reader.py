import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from duemq.errors import TopicNotFound
from duemq_analytics import options
from duemq_analytics.source import stream_reader
from duemq_analytics.source.plan import QueueBounds
from duemq_analytics.source.stream_reader import SILENCE_S, RangeStreamReader


class Clock:
    def __init__(self):
        self.now = 7.0

    def monotonic(self):
        return self.now

    def sleep(self, length_s):
        self.now += length_s


def test_in_silence_a_cluster_is_asked_twice_a_second(monkeypatch):
    """Spark wants to know every 10 ms."""
    clock, past, asked = Clock(), [3], []

    def queues(reader, planned=()):
        asked.append(clock.now - 7.0)
        return [QueueBounds("b", "h:1", 0, 0, past[0])]

    monkeypatch.setattr(stream_reader, "time", clock)
    monkeypatch.setattr(RangeStreamReader, "_queues", queues)
    reader = RangeStreamReader(options.parse({"topic": "t"}), None)
    end = reader.latestOffset({}, ReadAllAvailable())
    for past[0] in (4, 4, 4, 5, 6):
        clock.now += 0.01
        end = reader.latestOffset(end, ReadAllAvailable())
    assert [round(at, 2) for at in asked] == [
        *(0.0, 0.01, 0.02),  # while there is something
        *(0.02 + SILENCE_S, 0.02 + 2 * SILENCE_S),
        0.02 + 2 * SILENCE_S + 0.01,
    ]


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_stream_waits_for_a_topic_that_was_deleted_if_data_may_be_lost(monkeypatch, fail):
    def queues(reader, planned=()):
        raise TopicNotFound("no topic")

    monkeypatch.setattr(RangeStreamReader, "_queues", queues)
    reader = RangeStreamReader(options.parse({"topic": "t", "failOnDataLoss": fail}), None)
    with pytest.raises(TopicNotFound):  # it never was
        reader.initialOffset()
    begun = {"b": {"topic_id": 7, "queues": {"0": 3}}}
    planned = {"b": {"topic_id": 7, "queues": {"0": 5}}}
    for ask in (
        lambda: reader.latestOffset(begun, ReadAllAvailable()) == begun,
        lambda: reader.partitions(begun, planned) == [],
        lambda: reader.prepareForTriggerAvailableNow() is None,
    ):
        if fail == "false":
            assert ask()
        else:
            with pytest.raises(TopicNotFound):
                ask()
