from duemq.v1 import nameserver_pb2 as pb
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import Answer, Hello
from duemq_server.replication.protocol.record import HeldRecord, MemberChange, Record, ReplicaId
from duemq_server.replication.running.leading.roster import SILENT_MS, Roster

A, B, C = (ReplicaId(name, name * 32) for name in "abc")
NOW_MS = 50_000


def leading(*in_sync: ReplicaId) -> Leader:
    record = Record("g", 7, frozenset("abc"), frozenset(in_sync), 1, A)
    return Leader(
        A, HeldRecord("v1", record), Epochs(), start=0, committed=0, min_insync=1, now_ms=NOW_MS
    )


def follow(leader: Leader, replica: ReplicaId) -> None:
    """It has taken a heartbeat that was sent a second ago."""
    leader.hello(1, Hello("g", 7, replica, 1, (), 0, 0, 1), 0, NOW_MS)
    leader.answered(1, Answer(1, replica, 0, NOW_MS - 1_000), 0, NOW_MS)


def test_who_only_says_hello_is_away() -> None:
    """Who cannot take what comes does so each second, and each time nameservers would be told."""
    clock = [NOW_MS]
    leader, roster = leading(A), Roster(lambda: clock[0], "h:1")

    def reason() -> str:
        return next(each.reason for each in roster.reports(leader, 0, NOW_MS) if each.name == "b")

    assert roster.look(leader, ())
    assert reason() == "nothing is heard of it"
    for stream in (1, 2):
        roster.came("b", "h:2")
        assert "takes nothing" in reason()
        leader.hello(stream, Hello("g", 7, B, 1, (), 0, 0, 1), 0, NOW_MS)
        leader.answered(stream, Answer(1, B, 0, 0), 0, NOW_MS)
        assert not roster.look(leader, ())
        leader.broke(stream)
        assert not roster.look(leader, ())
    clock[0] += SILENT_MS + 1
    assert reason() == "nothing is heard of it"
    follow(leader, B)
    assert roster.look(leader, ())


def test_who_is_removed_is_reported_no_more() -> None:
    leader, roster = leading(A, B), Roster(lambda: NOW_MS, "h:1")
    assert roster.look(leader, ())
    assert not roster.look(leader, ())
    swap = leader.change_members(MemberChange("c", joins=False))
    assert swap is not None
    leader.won(swap.number, "v2")
    assert roster.look(leader, ())
    assert [each.name for each in roster.reports(leader, 0, NOW_MS)] == ["a", "b"]
    assert not roster.look(leader, ())


def test_a_learner_that_is_silent_does_not_catch_up() -> None:
    leader, roster = leading(A), Roster(lambda: NOW_MS, "h:1")
    follow(leader, B)

    def reason(now_ms: int) -> str:
        [b] = [each for each in roster.reports(leader, 100, now_ms) if each.name == "b"]
        assert b.role == pb.LEARNER
        return b.reason

    assert reason(NOW_MS) == "it catches up"
    assert reason(NOW_MS + SILENT_MS + 1_000) == "nothing is heard of it for 5 s"


def test_a_follower_that_is_silent_lacks_nothing_and_is_told_to_be_silent() -> None:
    """While nothing is written it has all; but without it nothing would be committed."""
    leader, roster = leading(A, B), Roster(lambda: NOW_MS, "h:1")
    follow(leader, B)

    def told(now_ms: int) -> tuple[int, bool, int, str]:
        [b] = [each for each in roster.reports(leader, 0, now_ms) if each.name == "b"]
        return b.role, b.in_sync, b.lag_bytes, b.reason

    assert told(NOW_MS) == (pb.FOLLOWER, True, 0, "")
    silent = "nothing is heard of it for 5 s"
    assert told(NOW_MS + SILENT_MS + 1_000) == (pb.FOLLOWER, True, 0, silent)


def test_who_gets_a_snapshot_is_not_said_to_be_away() -> None:
    leader, roster = leading(A, B), Roster(lambda: NOW_MS, "h:1")

    def told() -> dict[str, tuple[int, str]]:
        return {r.name: (r.role, r.reason) for r in roster.reports(leader, 100, NOW_MS)}

    silence = "nothing is heard of it"
    assert roster.look(leader, ())
    assert told() == {"a": (pb.LEADER, ""), "b": (pb.AWAY, silence), "c": (pb.AWAY, silence)}
    assert roster.look(leader, (), {"b", "c"})
    # The disk of b that is in the set is another one, and away.
    assert told()["b"] == (pb.AWAY, "it gets a snapshot")
    assert told()["c"] == (pb.LEARNER, "it gets a snapshot")
    assert not roster.look(leader, (), {"b", "c"})
