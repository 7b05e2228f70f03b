"""One stream of a member, as it ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from duemq.errors import FencedMember
from duemq.v1 import group_pb2
from duemq_server.broker.edge.members.sessions import Session, speak
from tests.manual_loop import ManualLoop


@pytest.mark.parametrize(("comes", "after_s"), [(True, 1), (False, 120)])
def test_who_is_replaced_has_time_to_end_its_stream(*, comes: bool, after_s: int) -> None:
    """Else its queues wait for its session's end: an assignment was being written down for it, or
    it does not read for a while, in a long callback."""
    with ManualLoop(0) as loop:

        async def main() -> None:
            session, written = Session(10), asyncio.Queue[group_pb2.CoordinatorEvent]()
            context: Any = SimpleNamespace(write=written.put)
            speaking = asyncio.create_task(speak(session, context))
            session.replace(Session(11))
            if comes:
                session.tell(group_pb2.CoordinatorEvent(assignment=group_pb2.Assignment()))
            assert (await written.get()).WhichOneof("event") == "error"
            await loop.silence(after_s)
            assert not speaking.done()
            session.tell(None)  # it has ended its stream
            with pytest.raises(FencedMember):
                await speaking

        loop.run_until_complete(main())
