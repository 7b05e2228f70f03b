"""Claims of timer services that mean another broker."""

import pytest

from duemq.errors import Unavailable
from duemq.protocol.names import TIMER_TOPIC
from duemq.v1 import broker_pb2
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.timer_admin_servicer import TimerAdminServicer
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.store.test_store import NOW_MS, TIMERS, opened, settle

STORE_ID = 7


@pytest.mark.parametrize("meant", [0, STORE_ID, STORE_ID + 1])
async def test_how_far_another_broker_was_taken_over_is_not_believed(meant: int) -> None:
    """It was at this address: what is left out here for that would pass for lost."""
    store = opened(FaultyDisk())
    settle(store)
    servicer = TimerAdminServicer(store, Commits(1 << 40), STORE_ID, lambda: NOW_MS)
    request = broker_pb2.ClaimTimerQueuesRequest(
        service=broker_pb2.TimerService(id=TIMERS.id, name="t1", shards=1),
        queue_ids=[0],
        ends=[broker_pb2.TimerQueueEnd(queue_id=0, offset=5)],
        store_id=meant,
    )
    taken = meant in {0, STORE_ID}  # 0: an older release
    if taken:
        await servicer.claim(request)
    else:
        with pytest.raises(Unavailable, match=f"this broker has {STORE_ID:016x}"):
            await servicer.claim(request)
    assert store.timer_owners.ids() == [TIMERS.id] * taken
    assert store.queue(TIMER_TOPIC, 0).next_offset == 5 * taken
