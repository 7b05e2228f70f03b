"""Claims of timer services, and their release: what the broker makes of who asks, and when."""

from typing import Any

import pytest

from duemq.errors import InvalidArgument, Unavailable
from duemq.protocol.limits import QUEUES_MAX
from duemq.protocol.names import TIMER_TOPIC
from duemq.v1 import broker_pb2, timer_admin_pb2
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.timer_admin_servicer import TimerAdminServicer
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.store.test_store import NOW_MS, TIMERS, opened, settle

STORE_ID = 7
STEADY_MS = 5_000
HOUR_MS = 3_600_000


def claim(**fields: Any) -> broker_pb2.ClaimTimerQueuesRequest:
    service = broker_pb2.TimerService(id=TIMERS.id, name="t1", shards=1)
    return broker_pb2.ClaimTimerQueuesRequest(service=service, queue_ids=[0], **fields)


@pytest.mark.parametrize("meant", [0, STORE_ID, STORE_ID + 1])
async def test_how_far_another_broker_was_taken_over_is_not_believed(meant: int) -> None:
    """It was at this address: what is left out here for that would pass for lost."""
    store = opened(FaultyDisk())
    settle(store)
    servicer = TimerAdminServicer(
        store, Commits(1 << 40), STORE_ID, lambda: NOW_MS, lambda: STEADY_MS
    )
    request = claim(ends=[broker_pb2.TimerQueueEnd(queue_id=0, offset=5)], store_id=meant)
    taken = meant in {0, STORE_ID}  # 0: an older release
    if taken:
        await servicer.claim(request)
    else:
        with pytest.raises(Unavailable, match=f"this broker has {STORE_ID:016x}"):
            await servicer.claim(request)
    assert store.timer_owners.ids() == [TIMERS.id] * taken
    assert store.queue(TIMER_TOPIC, 0).next_offset == 5 * taken


async def test_a_clock_that_is_set_makes_no_owner_look_gone() -> None:
    """What it holds would be released, though it lives, and be fired by another one, too."""
    store = opened(FaultyDisk())
    settle(store)
    now_ms, steady_ms = NOW_MS, STEADY_MS
    servicer = TimerAdminServicer(
        store, Commits(1 << 40), STORE_ID, lambda: now_ms, lambda: steady_ms
    )
    await servicer.claim(claim())
    release = timer_admin_pb2.ReleaseTimerQueuesRequest(id=TIMERS.id)
    for step_ms in (HOUR_MS, -2 * HOUR_MS):
        now_ms, steady_ms = now_ms + step_ms, steady_ms + 1_000
        with pytest.raises(InvalidArgument, match="was here"):
            await servicer.ReleaseTimerQueues(release, None)
        listed = await servicer.ListTimerOwners(timer_admin_pb2.ListTimerOwnersRequest(), None)
        assert now_ms - listed.queues[0].last_seen_ms == steady_ms - STEADY_MS
        assert listed.queues[0].since_ms == NOW_MS
    now_ms, steady_ms = now_ms - 10 * HOUR_MS, steady_ms + HOUR_MS
    await servicer.ReleaseTimerQueues(release, None)


@pytest.mark.parametrize("field", ["queue_ids", "ends"])
async def test_a_claim_names_no_more_queues_than_there_can_be(field: str) -> None:
    store = opened(FaultyDisk())
    settle(store)
    servicer = TimerAdminServicer(
        store, Commits(1 << 40), STORE_ID, lambda: NOW_MS, lambda: STEADY_MS
    )
    queues = {"queue_ids": 0, "ends": broker_pb2.TimerQueueEnd()}
    request = broker_pb2.ClaimTimerQueuesRequest(
        service=broker_pb2.TimerService(id=TIMERS.id, name="t1", shards=1),
        **{field: [queues[field]] * (QUEUES_MAX + 1)},
    )
    with pytest.raises(InvalidArgument, match=f"{field}: 1025 in a request, at most 1024"):
        await servicer.claim(request)
    assert not store.timer_owners.ids()
