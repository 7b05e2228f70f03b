"""One stream of a member, as it ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from duemq.errors import FencedMember
from duemq.v1 import group_pb2
from duemq_server.broker.edge.members.sessions import Session, speak


async def test_who_is_replaced_has_time_to_end_its_stream_whatever_was_on_its_way() -> None:
    """An assignment was being written down for it; its queues would wait for its session's end."""
    session, written = Session(10), asyncio.Queue[group_pb2.CoordinatorEvent]()
    context: Any = SimpleNamespace(write=written.put)
    speaking = asyncio.create_task(speak(session, context))
    session.replace(Session(11))
    session.tell(group_pb2.CoordinatorEvent(assignment=group_pb2.Assignment(generation=1)))
    assert (await written.get()).WhichOneof("event") == "error"
    for _ in range(10):
        await asyncio.sleep(0)
    assert not speaking.done()
    session.tell(None)  # it has ended its stream
    with pytest.raises(FencedMember):
        await speaking
