"""Of many callbacks it is asked once whether anybody traces or measures them."""

from types import SimpleNamespace

import pytest

from duemq.consumer.delivery.chunk_work import Caller, Work
from duemq.consumer.delivery.lease import Lease
from duemq.consumer.delivery.order_lanes import OrderLanes
from duemq.consumer.delivery.ordered_runs import Flow, OrderedCaller, OrderedRun
from duemq.consumer.fetching.process_queue import ProcessQueue
from duemq.message import Message, Untraced
from duemq.tracing import meters
from duemq.v1.message_pb2 import Record

COUNT = 20


@pytest.fixture
def asked(monkeypatch):
    """An entry for each time."""
    times, enabled = [], meters.enabled

    def counting():
        times.append(1)
        return enabled()

    monkeypatch.setattr(meters, "enabled", counting)
    return times


def source():
    return SimpleNamespace(pending=ProcessQueue(0))


def messages():
    origin = Untraced("orders", "broker-0", 3)
    return [Message(Record(body=b"x"), origin, offset, 0) for offset in range(COUNT)]


def work():
    of = source()
    return Work(of, of.pending.add(messages(), COUNT, 1))


def run():
    of = source()
    lanes = OrderLanes(lambda message: True)
    lanes.add(of.pending.add(messages(), COUNT, 1))
    return OrderedRun(Flow(of, lanes), lanes.take(0, COUNT))


def caller(callback, kind=Caller, *rest):
    return kind(callback, *rest, batch=False, group="g", client_id="c")


def test_by_a_thread(asked):
    given = work()
    caller(lambda message: None).call(given)
    assert (given.walk.next, len(asked)) == (COUNT, 1)


async def test_by_a_task(asked):
    async def callback(message):
        pass

    given = work()
    await caller(callback).call_async(given)
    assert (given.walk.next, len(asked)) == (COUNT, 1)


async def test_by_a_task_in_order(asked):
    async def callback(message):
        pass

    given = run()
    await caller(callback, OrderedCaller, Lease.forever(lambda: 0.0)).call_async(given)
    assert ([segment.done for segment in given.segments], len(asked)) == ([COUNT], 1)
