"""One stream of a member, as it ends."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from duemq.errors import FencedMember, InvalidArgument, Timeout
from duemq.v1 import group_pb2
from duemq_server.broker.edge.members.sessions import (
    HELLO_TIMEOUT_S,
    Session,
    first_event,
    speak,
)
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


def test_a_hello_that_is_late_may_come_again() -> None:
    """A connection that stood still is no wrong request: its member would give up for good."""
    with ManualLoop(0) as loop:

        async def silent() -> AsyncIterator[group_pb2.MemberEvent]:
            await asyncio.Event().wait()
            yield group_pb2.MemberEvent()

        async def ended() -> AsyncIterator[group_pb2.MemberEvent]:
            nothing: list[group_pb2.MemberEvent] = []
            for event in nothing:
                yield event

        async def main() -> None:
            waiting = asyncio.create_task(first_event(silent()))
            await loop.silence(HELLO_TIMEOUT_S + 1)
            with pytest.raises(Timeout) as late:
                await waiting
            assert late.value.retryable
            with pytest.raises(InvalidArgument):
                await first_event(ended())

        loop.run_until_complete(main())
