"""An operator's change of members, when the term that it is asked of is over."""

import asyncio
from collections.abc import Callable

import pytest

from duemq.errors import Unavailable
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.record import MemberChange
from duemq_server.replication.running.leading import members
from duemq_server.replication.running.leading.members import MemberChanges
from tests.unit.replication.running.leading.test_roster import A, B, C, leading

WITHOUT_C = MemberChange("c", joins=False)


def ended(changes: MemberChanges, leader: Leader) -> None:
    """Cut off: nobody has deposed it."""
    changes.end()
    assert not leader.is_over()


def resigned(_: MemberChanges, leader: Leader) -> None:
    leader.resign()


@pytest.mark.parametrize("over", [ended, resigned])
async def test_after_a_term_who_leads_next_is_to_be_asked_and_no_store_is_waited_for(
    over: Callable[[MemberChanges, Leader], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "CHANGE_S", 0.0)
    leader = leading(A, B, C)
    changes = MemberChanges(leader, 1, asyncio.Event())
    assert "members of g are a, b" in changes.would(WITHOUT_C)
    over(changes, leader)
    with pytest.raises(Unavailable, match="ask that one"):
        changes.would(WITHOUT_C)
    with pytest.raises(Unavailable, match="ask that one"):
        await changes.make(WITHOUT_C)
    assert not changes.busy


async def test_who_resigns_before_a_change_is_asked_for_refuses_it_as_a_matter_of_time() -> None:
    leader = leading(A, B, C)
    asked = asyncio.Event()
    changes = MemberChanges(leader, 1, asked)
    making = asyncio.create_task(changes.make(WITHOUT_C))
    await asked.wait()
    leader.resign()
    assert changes.next() is None
    with pytest.raises(Unavailable, match="ask that one"):
        await making
