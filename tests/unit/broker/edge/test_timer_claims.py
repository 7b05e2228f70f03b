"""Whose claim of timer queues a broker takes."""

import pytest

from duemq.errors import Unavailable
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.protocol.names import TIMER_TOPIC
from duemq.v1 import broker_pb2
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.timer_admin_servicer import TimerAdminServicer
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.store.test_store import NOW_MS, opened


def claim(store_id: int) -> broker_pb2.ClaimTimerQueuesRequest:
    return broker_pb2.ClaimTimerQueuesRequest(
        service=broker_pb2.TimerService(id=SERVICE_IDS_FROM, name="t", shards=1),
        queue_ids=[0],
        ends=[broker_pb2.TimerQueueEnd(queue_id=0, offset=50)],
        store_id=store_id,
    )


@pytest.mark.parametrize("told", [7, 0])
async def test_what_is_meant_for_another_broker_changes_nothing(told: int) -> None:
    """That one was at this address: how far its queues were taken over says nothing of these."""
    store = opened(FaultyDisk())
    servicer = TimerAdminServicer(store, Commits(1 << 40), 7, lambda: NOW_MS)
    with pytest.raises(Unavailable, match="0000000000000008"):
        await servicer.claim(claim(8))
    assert store.queue(TIMER_TOPIC, 0).next_offset == 0
    assert not store.timer_owners.ids()
    assert (await servicer.claim(claim(told))).store_id == 7  # 0: of an older release
    assert store.queue(TIMER_TOPIC, 0).next_offset == 50
