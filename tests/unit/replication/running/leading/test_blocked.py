import logging

import pytest

from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import Answer, Hello
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId
from duemq_server.replication.running.leading.blocked import TOLD_MS, Blocked

A, B, C = (ReplicaId(name, name * 32) for name in "abc")
NOW_MS, LAG_MAX_MS = 50_000, 3_000


def leading(*in_sync: ReplicaId, min_insync: int = 2) -> tuple[Leader, Blocked]:
    names = frozenset(each.name for each in in_sync)
    found = HeldRecord("v1", Record("g", 7, names, frozenset(in_sync), 1, A))
    leader = Leader(A, found, Epochs(), start=0, committed=0, min_insync=min_insync, now_ms=NOW_MS)
    return leader, Blocked(leader, min_insync, LAG_MAX_MS)


def follows(leader: Leader, replica: ReplicaId) -> None:
    """It has all of the log, 64 bytes."""
    leader.hello(1, Hello("g", 7, replica, 1, (), 0, 0, 1), 64, NOW_MS)
    leader.chunk(1, bytes(64), NOW_MS)
    leader.answered(1, Answer(1, replica, 64, NOW_MS), 64, NOW_MS)


def test_the_survivor_of_two_says_that_it_answers_nobody_and_what_helps() -> None:
    _, blocked = leading(A, B)
    assert blocked.look(NOW_MS) == ("b",)
    assert blocked.reason == (
        "nothing is committed: it waits for b; min_insync is 2, and 1 in sync is here;"
        " nobody is answered until they have followed: one that is there says why it does not,"
        " and for one whose disk is lost a new disk does"
    )


def test_a_leader_of_two_says_why_it_accepts_nothing() -> None:
    leader, blocked = leading(A, B)
    leader.synced(64)
    follows(leader, B)
    assert leader.prepared
    assert (blocked.look(NOW_MS), blocked.reason) == ((), "")
    assert blocked.look(NOW_MS + LAG_MAX_MS + 1) == ("b",)
    assert blocked.reason == (
        "nothing is committed: it waits for b; min_insync is 2, and 1 in sync is here"
    )


def test_where_enough_are_left_no_number_is_to_blame() -> None:
    leader, blocked = leading(A, B, C)
    leader.synced(64)
    follows(leader, B)
    assert blocked.look(NOW_MS) == ("c",)
    assert "min_insync" not in blocked.reason


def test_with_fewer_members_than_min_insync_it_waits_for_one_more() -> None:
    """All members are in sync, and nothing is ever committed: `replicas` names more, say."""
    leader, blocked = leading(A, B, min_insync=3)
    leader.synced(64)
    follows(leader, B)
    assert blocked.look(NOW_MS) == ("another member",)
    assert blocked.reason.startswith(
        "nothing is committed: it waits for another member; min_insync is 3, and 2 in sync are here"
    )


def test_while_a_change_that_would_make_enough_is_not_answered_too_few_are_in_sync() -> None:
    leader, blocked = leading(A, B)
    leader.synced(64)
    swap = leader.set.propose({A})
    leader.won(swap.number, "v2")
    follows(leader, B)
    assert blocked.look(NOW_MS) == ("b",)
    leader.unanswered(leader.set.propose({A, B}).number)
    assert not leader.set.enough
    assert blocked.look(NOW_MS) == ("b",)


def test_a_leader_whose_own_disk_stands_still_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Its followers have all, and nobody else would tell why nothing is committed."""
    leader, _ = leading(A, B)
    blocked = Blocked(leader, 2, lag_max_ms=10 * TOLD_MS)
    leader.synced(64)
    follows(leader, B)
    for now_ms in (0, TOLD_MS - 1):
        assert blocked.look(NOW_MS + now_ms, unsynced=True) == ()
    leader.synced(72)  # some of it was: the disk goes on
    for now_ms in (TOLD_MS, 2 * TOLD_MS - 1):
        assert blocked.look(NOW_MS + now_ms, unsynced=True) == ()
    assert blocked.reason == ""
    assert blocked.look(NOW_MS + 2 * TOLD_MS, unsynced=True) == ()
    assert blocked.reason == "nothing is committed: a sync of the disk here takes more than 3 s"
    assert caplog.messages == [blocked.reason]
    blocked.look(NOW_MS + 2 * TOLD_MS, unsynced=False)
    assert blocked.reason == ""


def test_the_log_is_told_once_and_not_of_a_moment(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    leader, blocked = leading(A, B)
    for now_ms in (0, TOLD_MS - 1):
        blocked.look(NOW_MS + now_ms)
    assert caplog.messages == []
    for now_ms in (TOLD_MS, TOLD_MS + 100, TOLD_MS + 200):
        blocked.look(NOW_MS + now_ms)
    assert caplog.messages == [blocked.reason]
    leader.synced(64)
    follows(leader, B)
    blocked.look(NOW_MS)
    assert caplog.messages[1:] == ["what is written is committed again"]
