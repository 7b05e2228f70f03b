"""What a timer service fetches of a queue, while more comes to it."""

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from duemq.errors import InvalidArgument, OffsetOutOfRange, Overloaded
from duemq.protocol.names import TIMER_TOPIC
from duemq.v1 import broker_pb2
from duemq_server.broker.edge.pulls.disk_reads import DiskReads
from duemq_server.broker.edge.pulls.fetching import FrameFetches
from duemq_server.broker.edge.pulls.parking import Parked, Parking
from duemq_server.broker.reading.waiters import Waiters
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.serving.unsent import Unsent
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch
from tests.unit.broker.store.test_store import NOW_MS, TIMED, opened, settle


async def test_a_fetch_waits_for_what_is_due_at_once_and_not_durable_yet() -> None:
    """Else it would be answered with the others, and that one a fetch later."""
    store = opened(FaultyDisk(), StoreSettings(timer_queues=1))
    store.create_topic("orders", 2)
    store.send(batch([b"later"], queue_id=1, delays_ms=struct.pack("<q", 50_000)), NOW_MS)
    settle(store)
    soon = store.send(batch([b"soon"], queue_id=1, **TIMED), NOW_MS)
    parking, unsent = Parking(lambda: NOW_MS), Unsent(1 << 20, 30)
    store.on_visible = parking.appended
    fetches = FrameFetches(store, parking, DiskReads(), lambda: NOW_MS, 7, unsent)
    caller: Any = SimpleNamespace(peer=lambda: "t0", add_done_callback=lambda _: None)
    request = broker_pb2.FetchFramesRequest(topic=TIMER_TOPIC, queue_id=0, offset=0, linger_ms=20)
    fetching = asyncio.create_task(fetches.fetch(request, caller))
    await asyncio.wait([fetching], timeout=0)  # it has begun
    assert not fetching.done()
    store.send(batch([b"soon, too"], queue_id=1, **TIMED), NOW_MS)
    while store.log.write_pending():
        pass
    store.durable(soon.settled)  # and no further
    answer = broker_pb2.FetchFramesResponse.FromString(await fetching)
    assert answer.next_offset == 2


@pytest.mark.parametrize("offset", [3, 4, 5, 6])
async def test_who_is_behind_the_end_and_lingers_is_not_given_what_comes_meanwhile(
    offset: int,
) -> None:
    """It came under offsets of others, which this data has lost: what lies before it, too."""
    store = opened(FaultyDisk(), StoreSettings(timer_queues=1))
    store.create_topic("orders", 2)
    settle(store)
    parking, unsent = Parking(lambda: NOW_MS), Unsent(1 << 20, 30)
    fetches = FrameFetches(store, parking, DiskReads(), lambda: NOW_MS, 7, unsent)
    caller: Any = SimpleNamespace(peer=lambda: "t0", add_done_callback=lambda _: None)
    request = broker_pb2.FetchFramesRequest(
        topic=TIMER_TOPIC, queue_id=0, offset=offset, linger_ms=20
    )
    fetching = asyncio.create_task(fetches.fetch(request, caller))
    await asyncio.wait([fetching], timeout=0)  # it has begun
    assert not fetching.done()
    for _ in range(5):
        store.send(batch([b"b"], queue_id=1, **TIMED), NOW_MS)
    settle(store)
    parking.close()  # it lingers no longer
    error = OffsetOutOfRange if offset > 5 else InvalidArgument
    with pytest.raises(error, match=f"offset: {offset} "):
        await fetching
    assert not unsent.held
    assert not any(store.timers_given.values())


async def test_what_is_there_is_answered_where_too_many_wait_for_a_fetch_to_linger() -> None:
    store = opened(FaultyDisk(), StoreSettings(timer_queues=1))
    store.create_topic("orders", 2)
    settle(store)
    parking, unsent = Parking(lambda: NOW_MS), Unsent(1 << 20, 30)
    parking.waiters = Waiters(waiters_max=1)
    parking.waiters.park(Parked(peer="somebody"), (), NOW_MS + 1)
    fetches = FrameFetches(store, parking, DiskReads(), lambda: NOW_MS, 7, unsent)
    caller: Any = SimpleNamespace(peer=lambda: "t0", add_done_callback=lambda _: None)
    request = broker_pb2.FetchFramesRequest(
        topic=TIMER_TOPIC, queue_id=0, linger_ms=20, wait_ms=20_000
    )
    with pytest.raises(Overloaded, match="wait_ms: 1 pulls wait"):
        await fetches.fetch(request, caller)
    store.send(batch([b"b"], queue_id=1, delays_ms=struct.pack("<q", 3_600_000)), NOW_MS)
    settle(store)
    answer = broker_pb2.FetchFramesResponse.FromString(await fetches.fetch(request, caller))
    assert (answer.next_offset, len(answer.frames) > 0) == (1, True)
