from types import SimpleNamespace

from duemq.protocol.balance import MessageQueue
from duemq_analytics.waterfall.trace_scan import TraceScan


class Consumer:
    """Has queues of numbered messages; one of `dead` brokers answers nothing."""

    def __init__(self, first, past, dead=()):
        self.past, self.dead, self.first = past, dead, first
        self.at = {}
        self.closed = False

    def assign(self, queues, *, start_from):
        self.at = {queue: self.first[queue.broker] for queue in queues}
        self.start_from = start_from

    def position(self, queue):
        return self.at[queue]

    def poll(self, timeout_s, messages_max):
        answer = []
        for queue, offset in self.at.items():
            if queue.broker not in self.dead and offset < self.past[queue.broker]:
                self.at[queue] += 1
                answer.append(
                    SimpleNamespace(
                        stored_topic=queue.topic,
                        broker=queue.broker,
                        queue=queue.queue_id,
                        offset=offset,
                    )
                )
        return answer

    def start(self):
        self.started = True

    def close(self):
        self.closed = True


def scan(consumer, *ends, silence_s=0.0):
    queues = [SimpleNamespace(broker=b, queue=0, min_offset=0, max_offset=end) for b, end in ends]
    return TraceScan(consumer, SimpleNamespace(name="%TRACE%", queues=queues), 60_000, silence_s)


def places(found):
    return sorted((each.broker, each.offset) for each in found.messages())


def test_all_since_then_up_to_the_ends_and_again():
    consumer = Consumer({"b0": 2, "b1": 0}, {"b0": 9, "b1": 1})
    with scan(consumer, ("b0", 4), ("b1", 1), ("b2", 0), silence_s=60.0) as found:
        for _ in range(2):
            assert places(found) == [("b0", 2), ("b0", 3), ("b1", 0)]
        assert consumer.started
        assert consumer.start_from.timestamp() == 60
        assert set(consumer.at) == {MessageQueue("%TRACE%", b, 0) for b in ("b0", "b1")}
        assert found.missing == ()
    assert consumer.closed


def test_a_broker_that_is_silent_is_said_and_left_out():
    consumer = Consumer({"b0": 0, "b1": 0}, {"b0": 1, "b1": 5}, dead={"b1"})
    with scan(consumer, ("b0", 1), ("b1", 5)) as found:
        assert places(found) == [("b0", 0)]
        assert [each.name for each in found.missing] == ["b1"]
        assert places(found) == [("b0", 0)]
        assert set(consumer.at) == {MessageQueue("%TRACE%", "b0", 0)}


def test_nothing_is_asked_of_an_empty_topic():
    consumer = Consumer({}, {})
    assert places(scan(consumer, ("b0", 0))) == []
    assert not hasattr(consumer, "start_from")
