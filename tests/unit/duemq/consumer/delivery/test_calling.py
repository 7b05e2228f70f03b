"""Of many callbacks it is asked once whether anybody traces or measures them; lists are copies."""

import asyncio
from contextlib import suppress
from contextvars import ContextVar
from types import SimpleNamespace

import pytest

from duemq.consumer.delivery.chunk_work import Caller, Work
from duemq.consumer.delivery.lease import Lease
from duemq.consumer.delivery.order_lanes import OrderLanes
from duemq.consumer.delivery.ordered_runs import Flow, OrderedCaller, OrderedRun
from duemq.consumer.fetching.process_queue import ProcessQueue
from duemq.message import Message, Untraced
from duemq.outcomes import BatchFailed
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


def caller(callback, kind=Caller, *rest, batch=False):
    return kind(callback, *rest, batch=batch, group="g", client_id="c")


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


@pytest.mark.parametrize("batch", [False, True])
async def test_by_a_task_that_is_cancelled_nothing_more_begins_in_order(batch):
    calls = []

    async def callback(given):
        calls.append(given)
        asyncio.current_task().cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    of = source()
    lanes = OrderLanes(lambda message: message.offset % 2)
    lanes.add(of.pending.add(messages(), COUNT, 1))
    given = OrderedRun(Flow(of, lanes), lanes.take(0, COUNT))
    ordered = caller(callback, OrderedCaller, Lease.forever(lambda: 0.0), batch=batch)
    await asyncio.create_task(ordered.call_async(given))
    assert len(calls) == 1
    assert sum(segment.done for segment in given.segments) == (COUNT // 2 if batch else 1)


@pytest.mark.parametrize("batch", [False, True])
def test_what_a_callback_sets_in_its_context_is_not_for_the_next(batch):
    customer, seen = ContextVar("customer", default="nobody"), []

    def callback(given):
        seen.append(customer.get())
        customer.set("somebody")

    first, second = work(), run()
    caller(callback, batch=batch).call(first)
    caller(callback, batch=batch).call(Work(first.source, first.chunk, (0,)))
    caller(callback, OrderedCaller, Lease.forever(lambda: 0.0), batch=batch).call(second)
    assert set(seen) == {"nobody"}
    assert customer.get() == "nobody"


class Changing:
    """A callback that changes its list, and then has done all but the last message, or all."""

    def __init__(self, change, last_fails):
        self._change = change
        self._last_fails = last_fails

    def __call__(self, given):
        last = given[-1]
        self._change(given)
        if self._last_fails:
            raise BatchFailed({last: ValueError()})

    async def awaited(self, given):
        self(given)


changes = pytest.mark.parametrize("change", [list.clear, list.reverse, lambda it: it.extend(it)])
fails = pytest.mark.parametrize("last_fails", [False, True])


@changes
@fails
async def test_what_a_callback_does_to_its_list_changes_nothing_of_the_queue(change, last_fails):
    callback, first, second = Changing(change, last_fails), work(), work()
    caller(callback, batch=True).call(first)
    await caller(callback.awaited, batch=True).call_async(second)
    undone = {COUNT - 1} if last_fails else set()
    for each in first, second:
        assert (each.walk.next, each.walk.aside) == (COUNT, undone)
        again = Work(each.source, each.chunk, tuple(range(COUNT)))
        caller(callback, batch=True).call(again)
        assert set(again.finished) == set(range(COUNT)) - undone


@changes
@fails
async def test_nor_in_order(change, last_fails):
    callback, first, second = Changing(change, last_fails), run(), run()
    lease = Lease.forever(lambda: 0.0)
    caller(callback, OrderedCaller, lease, batch=True).call(first)
    await caller(callback.awaited, OrderedCaller, lease, batch=True).call_async(second)
    for each in first, second:
        (segment,) = each.segments
        assert segment.done == COUNT - last_fails
        assert [failed.index for failed in segment.failures] == [COUNT - 1] * last_fails
