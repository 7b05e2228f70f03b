"""Timers under their owner's key in the twin: as the real ones."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from duemq import CancelOutcome, FireOutcome, Outgoing, RescheduleOutcome
from duemq.errors import InvalidArgument, NotAllSent, TimerExists, TooLarge, TopicNotFound
from duemq.protocol.limits import MESSAGE_BYTES_DEFAULT
from duemq.settings import ProducerSettings
from duemq.testing import MemoryCluster
from duemq.testing.aio import MemoryCluster as AioMemoryCluster

TOPIC = "reminders"


@pytest.fixture
def cluster():
    return MemoryCluster()


@pytest.fixture
def producer(cluster):
    with cluster.producer() as producer:
        yield producer


def bodies(cluster):
    return [message.body for message in cluster.messages(TOPIC)]


def test_what_waits_is_replaced(cluster, producer):
    first = producer.send(TOPIC, b"1", timer_key="k", delay="1h")
    assert (first.replaced, first.due_ms) == (None, cluster.now_ms + 3_600_000)
    second = producer.send(TOPIC, b"2", timer_key="k", delay="2h", key="look-up")
    assert second.replaced == first.handle
    assert [each.body for each in cluster.pending()] == [b"2"]
    assert producer.cancel(first) is CancelOutcome.CANCELLED
    cluster.advance("2h")
    assert bodies(cluster) == [b"2"]
    assert cluster.messages(TOPIC)[0].timer_key == "k"
    assert producer.send(TOPIC, b"3", timer_key="k", delay=1).replaced is None


def test_a_receipt_travels_between_processes(producer):
    producer.send(TOPIC, b"1", timer_key="k", delay="1h")
    second = producer.send(TOPIC, b"2", timer_key="k", delay="2h")
    again = pickle.loads(pickle.dumps(second))
    assert (again.handle, again.replaced) == (second.handle, second.replaced)


def test_what_waits_for_another_thread_s_message_under_its_key_is_stored(
    cluster, producer, monkeypatch
):
    stored, held, go_on = cluster._broker.schedule_keyed, threading.Event(), threading.Event()

    def hold(request):
        held.set()
        assert go_on.wait(60)
        return stored(request)

    monkeypatch.setattr(cluster._broker, "schedule_keyed", hold)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(producer.send, TOPIC, b"1", timer_key="k", delay="1h")
        assert held.wait(60)
        second = threads.submit(producer.send, TOPIC, b"2", timer_key="k", delay="2h")
        calls = producer._core._timer_calls
        while len(calls.lanes.open()) < 2:
            assert not second.done()
        go_on.set()
        assert second.result().replaced == first.result().handle


def test_debounce(cluster, producer):
    for body in (b"1", b"2", b"3"):
        producer.send(TOPIC, body, timer_key="k", delay="30s")
        cluster.advance("20s")
    assert bodies(cluster) == []
    cluster.advance("10s")
    assert bodies(cluster) == [b"3"]


def test_if_absent_says_what_is_there(cluster, producer):
    first = producer.send(TOPIC, b"1", timer_key="k", delay="1h", if_absent=True)
    with pytest.raises(TimerExists) as raised:
        producer.send(TOPIC, b"2", timer_key="k", delay="2h", if_absent=True)
    assert (raised.value.handle, raised.value.due_ms) == (first.handle, first.due_ms)
    due = datetime.fromtimestamp((first.due_ms or 0) / 1000, UTC)
    assert str(raised.value).endswith(f"until {due.isoformat(timespec='milliseconds')}")
    cluster.advance("1h")
    assert bodies(cluster) == [b"1"]
    assert producer.send(TOPIC, b"2", timer_key="k", delay=0, if_absent=True).replaced is None


def test_many(cluster, producer):
    producer.send(TOPIC, b"0", timer_key="k1", delay="1h")
    messages = [Outgoing(b"x", timer_key=f"k{n}", delay="1h", if_absent=True) for n in range(3)]
    with pytest.raises(NotAllSent) as raised:
        producer.send_many(TOPIC, messages)
    assert list(raised.value.failures) == [1]
    receipts = producer.send_many(
        TOPIC, [b"plain", *(Outgoing(b"y", timer_key=f"k{n}", delay="1h") for n in range(1_500))]
    )
    assert sum(each.replaced is not None for each in receipts) == 3
    assert len(cluster.pending()) == 1_500


def test_cancels_by_key(cluster, producer):
    producer.send(TOPIC, b"1", timer_key="a", delay="1h")
    producer.send(TOPIC, b"2", timer_key="b", delay=0)
    assert producer.cancel(key=(TOPIC, "a")) is CancelOutcome.CANCELLED
    outcomes = producer.cancel(key=[(TOPIC, "a"), (TOPIC, "b"), (TOPIC, "c")])
    assert [str(each) for each in outcomes] == ["cancelled", "fired", "unknown"]
    cluster.advance("2h")
    assert bodies(cluster) == [b"2"]


def test_reschedules(cluster, producer):
    keyed = producer.send(TOPIC, b"1", timer_key="a", delay="1h")
    plain = producer.send(TOPIC, b"2", delay="1h", ordering_key="o")
    answer = producer.reschedule(key=(TOPIC, "a"), delay="3h")
    assert answer.outcome is RescheduleOutcome.RESCHEDULED
    assert answer.due_ms == cluster.now_ms + 10_800_000
    [moved] = producer.reschedule([plain], deliver_at=cluster.now_ms + 7_200_000)
    assert (moved.outcome, moved.handle == plain.handle) == (RescheduleOutcome.RESCHEDULED, False)
    assert producer.reschedule(keyed, delay=1).outcome is RescheduleOutcome.UNKNOWN
    assert producer.cancel(keyed) is CancelOutcome.CANCELLED
    cluster.advance("1h")
    assert bodies(cluster) == []
    cluster.advance("2h")
    assert bodies(cluster) == [b"2", b"1"]
    assert producer.reschedule(answer.handle, delay=1).outcome is RescheduleOutcome.FIRED
    producer.send(TOPIC, b"3", timer_key="b", delay="1h")
    assert producer.reschedule(key=(TOPIC, "b"), delay=0).outcome is RescheduleOutcome.RESCHEDULED
    assert bodies(cluster)[-1] == b"3"


def test_what_is_wrong_is_refused_as_ever(cluster, producer):
    with pytest.raises(InvalidArgument, match="only a delayed message has one"):
        producer.send(TOPIC, b"", timer_key="k")
    with pytest.raises(InvalidArgument, match="delay or deliver_at"):
        producer.reschedule(key=(TOPIC, "k"))
    with pytest.raises(TooLarge, match="body"):
        producer.send(TOPIC, b"x" * (MESSAGE_BYTES_DEFAULT + 1), timer_key="k", delay=1)
    strict = cluster.producer(settings=ProducerSettings(create_topics=False))
    with strict, pytest.raises(TopicNotFound):
        strict.send("none", b"", timer_key="k", delay=1)


async def test_the_asyncio_twin_has_the_same():
    cluster = AioMemoryCluster()
    async with cluster.producer() as producer:
        first = await producer.send(TOPIC, b"1", timer_key="k", delay="1h")
        assert (await producer.submit(TOPIC, b"2", timer_key="k", delay=5)).replaced == first.handle
        with pytest.raises(TimerExists):
            await producer.send(TOPIC, b"3", timer_key="k", delay=5, if_absent=True)
        assert (await producer.reschedule(key=(TOPIC, "k"), delay=7)).due_ms is not None
        assert await producer.cancel(key=(TOPIC, "k")) is CancelOutcome.CANCELLED
        await producer.flush()


def test_what_is_fired_by_hand_is_delivered_now_and_once(cluster, producer):
    first = producer.send(TOPIC, b"1", timer_key="k", delay="1h")
    second = producer.send(TOPIC, b"2", delay="2h")
    assert producer.fire(key=(TOPIC, "k")) is FireOutcome.FIRED
    assert producer.fire([first, second]) == [FireOutcome.FIRED_BEFORE, FireOutcome.FIRED]
    assert bodies(cluster) == [b"1", b"2"]
    assert [each.due_ms for each in cluster.messages(TOPIC)] == [cluster.now_ms] * 2
    assert producer.cancel([first, second]) == [CancelOutcome.FIRED] * 2
    assert producer.fire(key=(TOPIC, "other")) is FireOutcome.UNKNOWN
    cluster.advance("2h")
    assert len(bodies(cluster)) == 2
