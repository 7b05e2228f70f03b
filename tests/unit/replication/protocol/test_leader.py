from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import (
    CHUNK_BYTES_MAX,
    UNANSWERED_BYTES_MAX,
    Answer,
    Hello,
    NeedsSnapshot,
    Reason,
    Refusal,
    Welcome,
)
from duemq_server.replication.protocol.record import (
    HeldRecord,
    MemberChange,
    Record,
    Refused,
    ReplicaId,
)
from duemq_server.replication.protocol.times import Times

A, B, C = (ReplicaId(name, name * 32) for name in "abc")
RECORD = Record("g", 7, frozenset("abc"), frozenset({A, B, C}), 4, A)
START = 1_000
NOW_MS = 50_000
TIMES = Times()


def leading(*in_sync: ReplicaId, min_insync: int = 2, **known: Any) -> Leader:
    record = replace(RECORD, in_sync=frozenset(in_sync))
    known = {"start": START, "committed": 800, "log_start": 0} | known
    leader = Leader(
        A,
        HeldRecord("v1", record),
        Epochs([(1, 0)]),
        min_insync=min_insync,
        now_ms=NOW_MS,
        times=TIMES,
        **known,
    )
    leader.synced(known["start"])
    return leader


def hello(replica: ReplicaId, end: int = START, **known: Any) -> Hello:
    known = {"epoch": 4, "epochs": ((1, 0),), "start": 0, "group": "g", "store_id": 7} | known
    known = {"log_version": 1} | known
    return Hello(replica=replica, end=end, **known)


def follow(leader: Leader, stream: int, replica: ReplicaId, end: int = START) -> None:
    assert isinstance(leader.hello(stream, hello(replica, end), START, NOW_MS), Welcome)


def ship(leader: Leader, stream: int, end: int, now_ms: int = NOW_MS) -> None:
    """All is sent up to there, and answered."""
    progress = leader.followers[stream]
    if progress.next < end:
        leader.chunk(stream, bytes(end - progress.next), now_ms)
    answer(leader, stream, end, now_ms=now_ms)


def answer(
    leader: Leader, stream: int, durable: int, *, end: int = START, now_ms: int = NOW_MS
) -> None:
    replica = leader.followers[stream].replica
    leader.answered(stream, Answer(4, replica, durable, now_ms), end, now_ms)


# -- what is committed


def test_committed_is_what_all_in_sync_have_on_disk() -> None:
    leader = leading(A, B, C)
    follow(leader, 1, B)
    follow(leader, 2, C)
    leader.synced(2_000)
    ship(leader, 1, 1_500)
    assert leader.high_watermark == 800
    ship(leader, 2, 1_200)
    assert leader.high_watermark == 1_200
    assert leader.prepared
    ship(leader, 2, 3_000)
    assert leader.high_watermark == 1_500
    ship(leader, 1, 3_000)
    assert leader.high_watermark == 2_000


def test_nothing_is_committed_by_a_set_that_is_too_small() -> None:
    leader = leading(A, min_insync=2)
    leader.synced(9_000)
    assert leader.high_watermark == 800
    alone = leading(A, min_insync=1)
    alone.synced(9_000)
    assert alone.high_watermark == 9_000


def test_a_leader_has_prepared_when_its_epoch_entry_is_committed() -> None:
    leader = leading(A, min_insync=1)
    leader.synced(START)
    assert not leader.prepared
    leader.synced(START + 64)
    assert leader.prepared


def test_what_a_follower_says_to_have_counts_as_far_as_it_was_sent() -> None:
    leader = leading(A, B)
    follow(leader, 1, B)
    leader.synced(9_000)
    answer(leader, 1, 9_000)
    assert leader.high_watermark == START


def test_answers_of_others_do_not_count() -> None:
    leader = leading(A, B)
    follow(leader, 1, B)
    leader.synced(2_000)
    leader.chunk(1, bytes(1_000), NOW_MS)
    for epoch, replica, stream in [(3, B, 1), (5, B, 1), (4, C, 1), (4, B, 2)]:
        leader.answered(stream, Answer(epoch, replica, 2_000, NOW_MS), 2_000, NOW_MS)
    assert leader.high_watermark == 800


# -- who may follow


def test_a_follower_keeps_what_both_have() -> None:
    leader = leading(A, B, C)
    assert leader.hello(1, hello(B, 900), 1_064, NOW_MS) == Welcome(4, A, 900)
    longer = hello(B, 2_000, epochs=((1, 0), (3, 950)))
    assert leader.hello(1, longer, 1_064, NOW_MS) == Welcome(4, A, 950)


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"epoch": 3}, Reason.STALE),
        ({"epoch": 5}, Reason.NOT_LEADING),
        ({"epoch": 5, "group": "h"}, Reason.FOREIGN),  # whose epochs say nothing
        ({"group": "h"}, Reason.FOREIGN),
        ({"store_id": 8}, Reason.FOREIGN),
        ({"replica": ReplicaId("x", "x")}, Reason.STRANGER),
        ({"log_version": 0}, Reason.STRANGER),  # an older release
        ({"end": 700}, Reason.LOST),
    ],
)
def test_who_may_not_follow(known: dict[str, Any], reason: Reason) -> None:
    leader = leading(A, B, C)
    answer = leader.hello(1, hello(**({"replica": B} | known)), START, NOW_MS)
    assert isinstance(answer, Refusal)
    assert answer.reason is reason
    assert leader.followers == {}
    assert leader.deposed == (reason is Reason.NOT_LEADING)


def test_who_has_lost_what_is_committed_is_told_what_helps() -> None:
    answer = leading(A, B, C).hello(1, hello(B, 700), START, NOW_MS)
    assert isinstance(answer, Refusal)
    assert "start it with an empty directory" in answer.text


def test_two_processes_of_one_name_do_not_take_turns() -> None:
    leader = leading(A, B, C)
    follow(leader, 1, B)
    ship(leader, 1, START)
    impostor = ReplicaId("b", "d" * 32)
    late_ms = NOW_MS + TIMES.heard_ms
    answer = leader.hello(2, hello(impostor), START, late_ms - 1)
    assert isinstance(answer, Refusal)
    assert answer.reason is Reason.STRANGER
    assert list(leader.followers) == [1]
    assert isinstance(leader.hello(2, hello(impostor), START, late_ms), Welcome)
    assert list(leader.followers) == [2]


@pytest.mark.parametrize(
    ("copy", "address"), [(B, "other:1"), (ReplicaId("c", B.disk), "b:1")], ids=["name", "disk"]
)
def test_a_copy_of_a_disk_does_not_follow_while_the_disk_does(
    copy: ReplicaId, address: str
) -> None:
    leader = leading(A, B, C)
    assert isinstance(leader.hello(1, hello(B, address="b:1"), START, NOW_MS), Welcome)
    ship(leader, 1, START)
    late_ms = NOW_MS + TIMES.heard_ms
    answer = leader.hello(2, hello(copy, address=address), START, late_ms - 1)
    assert isinstance(answer, Refusal)
    assert answer.reason is Reason.STRANGER
    assert f"disk of {B} at b:1, which follows" in answer.text
    assert "copy" in answer.text
    assert list(leader.followers) == [1]
    assert isinstance(leader.hello(3, hello(B, address="b:1"), START, late_ms - 1), Welcome)
    assert list(leader.followers) == [3]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_copy_of_the_leaders_disk_does_not_follow(name: str) -> None:
    leader = leading(A, B, C)
    answer = leader.hello(1, hello(ReplicaId(name, A.disk)), START, NOW_MS)
    assert isinstance(answer, Refusal)
    assert answer.reason is Reason.STRANGER
    assert f"disk of {A}, which leads" in answer.text
    assert leader.followers == {}


def test_a_disk_that_says_hello_again_is_at_once_welcome() -> None:
    leader = leading(A, B, C)
    follow(leader, 1, B)
    ship(leader, 1, START)
    follow(leader, 2, B)
    assert list(leader.followers) == [2]


def test_a_learner_may_have_less_than_what_is_committed() -> None:
    leader = leading(A, B)
    assert leader.hello(1, hello(C, 0, epochs=()), START, NOW_MS) == Welcome(4, A, 0)


def test_who_is_too_far_behind_needs_a_snapshot() -> None:
    leader = leading(A, B, log_start=600)
    answer = leader.hello(1, hello(C, 500), START, NOW_MS)
    assert answer == NeedsSnapshot(4, A, 600)
    answer = leader.hello(1, hello(C, 900, start=950, epochs=((2, 960),)), START, NOW_MS)
    assert isinstance(answer, NeedsSnapshot)


def test_a_takeover_that_was_overtaken_does_not_lead() -> None:
    with pytest.raises(Refused, match="epoch 6 has begun"):
        Leader(
            A,
            HeldRecord("v1", RECORD),
            Epochs([(6, 0)]),
            start=START,
            committed=0,
            min_insync=1,
            now_ms=0,
        )


# -- sending


def test_a_follower_is_sent_what_is_written_in_chunks_and_within_a_window() -> None:
    leader = leading(A, B)
    follow(leader, 1, B)
    written = START + 3 * UNANSWERED_BYTES_MAX
    assert leader.to_read(1, START) is None
    assert leader.to_read(1, START + 10) == (START, 10)
    sent = 0
    while (wanted := leader.to_read(1, written)) is not None:
        assert wanted[1] <= CHUNK_BYTES_MAX
        assert leader.chunk(1, bytes(wanted[1]), NOW_MS).position == START + sent
        sent += wanted[1]
    assert sent == UNANSWERED_BYTES_MAX
    answer(leader, 1, START + 100)
    assert leader.to_read(1, written) == (START + sent, 100)
    assert leader.to_read(9, written) is None


def test_a_chunk_says_what_is_committed() -> None:
    leader = leading(A, B, log_start=8)
    follow(leader, 1, B)
    chunk = leader.chunk(1, b"", 77, take_over=True)
    assert (chunk.epoch, chunk.leader, chunk.position, chunk.committed) == (4, A, START, 800)
    assert (chunk.log_start, chunk.sent_ms, chunk.take_over) == (8, 77, True)


# -- the set


def test_who_follows_and_has_all_that_is_committed_is_admitted() -> None:
    leader = leading(A, B)
    follow(leader, 1, B)
    follow(leader, 2, C)
    leader.synced(2_000)
    ship(leader, 1, 2_000)
    ship(leader, 2, 1_999)
    assert leader.change(NOW_MS) is None
    ship(leader, 2, 2_000)
    swap = leader.change(NOW_MS)
    assert swap is not None
    assert swap.record.in_sync == {A, B, C}
    leader.synced(3_000)
    ship(leader, 1, 3_000)
    assert leader.high_watermark == 2_000  # the one that is being admitted counts
    leader.won(swap.number, "v2")
    ship(leader, 2, 3_000)
    assert leader.high_watermark == 3_000


def test_who_has_not_the_epochs_first_entry_is_not_admitted() -> None:
    leader = leading(A, B)
    follow(leader, 1, B)
    follow(leader, 2, C)
    ship(leader, 2, START)
    assert leader.change(NOW_MS) is None
    ship(leader, 2, START + 64)
    assert leader.change(NOW_MS) is not None


def test_whose_stream_broke_is_removed_at_once() -> None:
    leader = leading(A, B, C)
    follow(leader, 1, B)
    follow(leader, 2, C)
    assert leader.change(NOW_MS) is None
    leader.broke(2)
    swap = leader.change(NOW_MS)
    assert swap is not None
    assert swap.record.in_sync == {A, B}
    leader.synced(2_000)
    ship(leader, 1, 2_000)
    assert leader.high_watermark == 800  # who left counts until the change is made
    leader.won(swap.number, "v2")
    assert leader.high_watermark == 2_000


def test_who_never_came_is_removed_after_a_while() -> None:
    leader = leading(A, B, C)
    follow(leader, 1, B)
    ship(leader, 1, START)
    assert leader.change(NOW_MS + TIMES.lag_max_ms) is None
    later = NOW_MS + TIMES.lag_max_ms + 1
    ship(leader, 1, START, now_ms=later)
    swap = leader.change(later)
    assert swap is not None
    assert swap.record.in_sync == {A, B}


def test_who_lags_is_removed_and_who_keeps_up_is_not() -> None:
    leader = leading(A, B, C)
    follow(leader, 1, B)
    follow(leader, 2, C)
    end = START
    for second in range(1, 8):
        now_ms = NOW_MS + 1_000 * second
        for stream in (1, 2):
            leader.chunk(stream, bytes(1_000), now_ms)
        # Both are always behind; one by what came in the last second.
        answer(leader, 1, end, end=end + 1_000, now_ms=now_ms)
        answer(leader, 2, START, end=end + 1_000, now_ms=now_ms)
        end += 1_000
    swap = leader.change(now_ms)
    assert swap is not None
    assert swap.record.in_sync == {A, B}


def test_who_is_silent_is_not_admitted_again_until_it_is_heard() -> None:
    """Nothing is written meanwhile, so it has all."""
    leader = leading(A, B, C)
    for stream, replica in ((1, B), (2, C)):
        follow(leader, stream, replica)
    leader.synced(2_000)
    ship(leader, 1, 2_000)
    ship(leader, 2, 2_000)
    silent_ms = NOW_MS + TIMES.lag_max_ms + 1
    answer(leader, 1, 2_000, end=2_000, now_ms=silent_ms)
    swap = leader.change(silent_ms)
    assert swap is not None
    assert swap.record.in_sync == {A, B}
    leader.won(swap.number, "v2")
    assert leader.change(silent_ms + 100) is None
    answer(leader, 2, 2_000, end=2_000, now_ms=silent_ms + 200)
    back = leader.change(silent_ms + 200)
    assert back is not None
    assert back.record.in_sync == {A, B, C}


def test_the_set_is_never_made_too_small() -> None:
    leader = leading(A, B)
    follow(leader, 1, B)
    leader.broke(1)
    assert leader.change(NOW_MS) is None


def test_a_dead_member_is_exchanged_for_a_new_one_in_one_change() -> None:
    leader = leading(A, B)
    follow(leader, 1, B)
    leader.broke(1)
    anew = ReplicaId("b", "anew")
    leader.hello(2, hello(anew, 0, epochs=()), START, NOW_MS)
    ship(leader, 2, 2_000)
    swap = leader.change(NOW_MS)
    assert swap is not None
    assert swap.record.in_sync == {A, anew}


def test_a_new_stream_of_a_name_ends_the_old_one() -> None:
    leader = leading(A, B, C)
    follow(leader, 1, B)
    follow(leader, 2, B)
    assert list(leader.followers) == [2]


def test_a_lost_answer_is_settled_through_the_leader() -> None:
    leader = leading(A, B, C)
    follow(leader, 1, B)
    leader.broke(1)
    swap = leader.change(NOW_MS)
    assert swap is not None
    leader.unanswered(swap.number)
    assert leader.change(NOW_MS) is None
    again = leader.read(HeldRecord("v2", swap.record))
    assert again is not None
    leader.won(again.number, "v3")
    assert leader.record.in_sync == {A, C}
    later = leader.lost(swap.number, None)  # an answer that comes after all says nothing
    assert (later, leader.deposed) == (None, False)


def test_the_successor_has_space_if_any_has() -> None:
    leader = leading(A, B, C)
    for stream, replica in ((1, B), (2, C)):
        follow(leader, stream, replica)
        leader.chunk(stream, bytes(1_000), NOW_MS)
        leader.answered(stream, Answer(4, replica, 2_000, NOW_MS, replica == B), 2_000, NOW_MS)
    leader.synced(2_000)
    assert leader.successor(2_000) == C
    assert leader.successor(2_000, "b") == B  # an operator's word
    assert leader.may_relieve(with_space=True)
    leader.broke(2)
    assert leader.successor(2_000) == B
    assert leader.may_relieve(with_space=False)
    assert not leader.may_relieve(with_space=True)


def test_a_leader_is_outrun_by_as_many_as_commit_without_it() -> None:
    leader = leading(A, B, C, min_insync=2)
    follow(leader, 1, B)
    follow(leader, 2, C)
    assert not leader.is_outrun()
    ship(leader, 1, 2_000)
    assert not leader.is_outrun()  # B would wait for A
    ship(leader, 2, 1_500)
    assert leader.is_outrun()
    leader.synced(1_500)
    assert not leader.is_outrun()
    alone = leading(A, B, min_insync=1)
    follow(alone, 1, B)
    ship(alone, 1, 2_000)
    assert alone.is_outrun()


def test_the_successor_has_all_and_is_in_sync() -> None:
    leader = leading(A, B)
    follow(leader, 1, B)
    follow(leader, 2, C)
    leader.synced(2_000)
    ship(leader, 2, 2_000)
    assert leader.successor(2_000) is None
    ship(leader, 1, 2_000)
    assert leader.successor(2_000) == B


# -- the members

WITHOUT_C = MemberChange("c", joins=False)
WITH_D = MemberChange("d", joins=True)


def test_who_is_removed_counts_until_that_is_done_and_is_sent_nothing_then() -> None:
    leader = leading(A, B, C)
    follow(leader, 1, B)
    follow(leader, 2, C)
    leader.synced(3_000)
    ship(leader, 1, 3_000)
    swap = leader.change_members(WITHOUT_C)
    assert swap is not None
    assert (swap.record.members, swap.record.in_sync) == ({"a", "b"}, {A, B})
    assert leader.high_watermark == 800
    assert leader.change_members(WITH_D) is None  # one after the other
    leader.won(swap.number, "v2")
    assert leader.high_watermark == 3_000
    assert list(leader.followers) == [1]
    refused = leader.hello(3, hello(C), START, NOW_MS)
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.text) == (
        Reason.STRANGER,
        "c is no member of g: members are a, b",
    )
    assert leader.change_members(WITHOUT_C) is None  # it is done


def test_who_is_added_may_follow_and_is_admitted_like_any_other() -> None:
    leader = leading(A, B, C)
    d = ReplicaId("d", "d" * 32)
    assert isinstance(leader.hello(4, hello(d), START, NOW_MS), Refusal)
    swap = leader.change_members(WITH_D)
    assert swap is not None
    assert swap.record.in_sync == {A, B, C}
    leader.won(swap.number, "v2")
    follow(leader, 4, d)
    leader.synced(2_000)
    ship(leader, 4, 2_000)
    admitted = leader.change(NOW_MS)
    assert admitted is not None
    assert d in admitted.record.in_sync


def test_a_change_of_members_whose_answer_was_lost_is_settled_first() -> None:
    leader = leading(A, B, C)
    swap = leader.change_members(WITHOUT_C)
    assert swap is not None
    leader.unanswered(swap.number)
    assert leader.change_members(WITHOUT_C) is None
    again = leader.read(HeldRecord("v1", swap.record))  # it was done
    assert again is not None
    assert (again.record.members, again.record.in_sync) == ({"a", "b"}, {A, B})
    assert leader.set.counted == {A, B, C}
    leader.won(again.number, "v3")
    assert leader.record.members == {"a", "b"}
    assert leader.set.counted == {A, B}


def test_who_is_about_to_lead_no_more_changes_no_members() -> None:
    leader = leading(A, B, C)
    leader.resign()
    with pytest.raises(Refused, match="about to lead"):
        leader.change_members(WITH_D)


# -- reads


def test_a_leader_serves_while_its_lease_holds() -> None:
    leader = leading(A, B)
    assert not leader.serves(NOW_MS)
    leader.renewed(NOW_MS)
    assert leader.serves(NOW_MS + TIMES.serve_ms - 1)
    assert not leader.serves(NOW_MS + TIMES.serve_ms)


def test_a_leader_serves_while_all_in_sync_answer() -> None:
    leader = leading(A, B, C)
    follow(leader, 1, B)
    follow(leader, 2, C)
    assert not leader.serves(NOW_MS)
    ship(leader, 1, START)
    assert not leader.serves(NOW_MS)
    ship(leader, 2, START)
    assert leader.serves(NOW_MS)
    assert not leader.serves(NOW_MS + TIMES.heard_ms)


def test_a_set_of_one_serves_alone_until_it_is_deposed() -> None:
    leader = leading(A, min_insync=1)
    assert leader.serves(NOW_MS + 1_000_000)
    leader.renewed(NOW_MS)
    leader.read(None)
    assert not leader.serves(NOW_MS)


def test_another_process_under_the_leaders_name_is_turned_away() -> None:
    """Else it would be admitted beside it, as one more of `min_insync`, and shown by nobody."""
    leader = leading(A, B, C)
    other = ReplicaId(A.name, "d" * 32)
    refused = leader.hello(1, hello(other, end=0), START, NOW_MS)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.STRANGER
    assert refused.text == f"{A} leads: two processes have one name"
    assert not leader.followers
