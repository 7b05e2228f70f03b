"""Cancels as they come: how long they wait for what has not arrived."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from duemq.v1 import error_pb2, message_pb2, timer_pb2
from duemq_server.timer_service.edge.cancel_requests import ARRIVAL_TIMEOUT_S, CancelRequests
from duemq_server.timer_service.scheduling.cancelling import CANCELLED, NOT_YET
from duemq_server.timer_service.timers.log_entries import Cancelled


@pytest.mark.parametrize(
    ("left_s", "waits_s"),
    [(None, ARRIVAL_TIMEOUT_S), (60.0, ARRIVAL_TIMEOUT_S), (5.0, 4.0), (1.0, 0.5)],
)
def test_who_has_little_time_is_told_in_time_what_is_known(
    left_s: float | None, waits_s: float
) -> None:
    """Of a list with one that has not arrived he would hear nothing at all."""
    waited: list[float] = []

    async def cancel(asked: Sequence[Cancelled], wait_s: float) -> list[str]:
        waited.append(wait_s)
        return [CANCELLED, NOT_YET]

    async def nobody(*asked: object) -> tuple[()]:
        return ()

    links: Any = SimpleNamespace(
        untold=dict,
        place=SimpleNamespace(has=lambda queue_id: True),
        check_may_answer=lambda store_id: None,
        why_not_arrived=lambda store_id: "has not arrived",
    )
    shard: Any = SimpleNamespace(scheduler=None, cancel=cancel)
    others: Any = SimpleNamespace(there=False, each=nobody)
    request = timer_pb2.CancelRequest(
        handles=[message_pb2.TimerHandle(store_id=1, offset=n, due_ms=1) for n in range(2)]
    )

    answer = asyncio.run(CancelRequests(shard, links, others).cancel(request, lambda: left_s))

    assert waited == [waits_s]
    assert answer.results[0].outcome == timer_pb2.CANCELLED
    assert answer.results[1].error.code == error_pb2.UNAVAILABLE
