from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.follower import Extend, Follower, StreamBroken
from duemq_server.replication.protocol.messages import Answer, Chunk, NeedsSnapshot, Welcome
from duemq_server.replication.protocol.record import LOG_VERSION, Record, Refused, ReplicaId
from duemq_server.storage import record
from duemq_server.storage.replicas import epoch

A, B = (ReplicaId(name, name * 32) for name in "ab")
RECORD = Record("g", 7, frozenset("ab"), frozenset({A, B}), 4, A)
END = 800


def following(*, welcomed: bool = True, **known: Any) -> Follower:
    known = {"start": 0, "end": END, "durable": END, "committed": 600} | known
    follower = Follower(B, RECORD, Epochs([(1, 0), (3, 640)]), **known)
    if welcomed:
        assert follower.welcome(Welcome(4, A, known["end"])) is None
    return follower


def entries(position: int, *kinds: int) -> bytes:
    data = b""
    for number, kind in enumerate(kinds):
        body = epoch.encode(4 + number, bytes(16), 0) if kind == epoch.KIND else b"body"
        data += b"".join(record.encode(kind, [body], len(body), position + len(data), 0))
    return data


def chunk(data: bytes = b"", position: int = END, committed: int = 700, **known: Any) -> Chunk:
    known = {"epoch": 4, "leader": A, "log_start": 0, "sent_ms": 9} | known
    return Chunk(position=position, data=data, committed=committed, **known)


def test_it_says_what_its_log_holds() -> None:
    hello = following().hello()
    assert (hello.group, hello.store_id, hello.replica, hello.epoch) == ("g", 7, B, 4)
    assert (hello.epochs, hello.start, hello.end) == (((1, 0), (3, 640)), 0, END)


@pytest.mark.parametrize(
    "followed", [replace(RECORD, leader=None), replace(RECORD, leader=B), replace(RECORD, epoch=2)]
)
def test_whom_it_does_not_follow(followed: Record) -> None:
    with pytest.raises(Refused, match=r"nobody leads|set back"):
        Follower(B, followed, Epochs([(3, 0)]), start=0, end=64, durable=64, committed=0)


def test_it_does_not_follow_a_log_of_a_newer_release() -> None:
    newer = replace(RECORD, log_version=LOG_VERSION + 1)
    with pytest.raises(Refused, match="version 2, and this release reads up to 1"):
        Follower(B, newer, Epochs([(1, 0)]), start=0, end=64, durable=64, committed=0)
    assert following().hello().log_version == LOG_VERSION


def test_it_goes_on_where_both_logs_agree() -> None:
    follower = following(welcomed=False)
    assert follower.welcome(Welcome(4, A, 640)) == 640
    follower.truncated(640)
    assert (follower.end, follower.durable, follower.epochs.last) == (640, 640, 1)
    extend = follower.chunk(chunk(entries(640, 1), position=640))
    assert extend is not None
    assert extend.end == follower.end


def test_it_never_goes_below_what_is_committed() -> None:
    follower = following(welcomed=False)
    with pytest.raises(Refused, match="of which 600 are committed"):
        follower.welcome(Welcome(4, A, 592))
    assert follower.welcome(Welcome(4, A, 600)) == 600


def test_a_snapshot_takes_the_place_of_nothing_that_its_leader_lacks() -> None:
    follower = following(welcomed=False)
    assert follower.needs_snapshot(NeedsSnapshot(4, A, 608))
    with pytest.raises(Refused, match="from 600 on, lacks what is committed here, up to 600"):
        follower.needs_snapshot(NeedsSnapshot(4, A, 600))
    with pytest.raises(StreamBroken, match="not what the record says"):
        follower.needs_snapshot(NeedsSnapshot(3, A, 608))


def test_of_a_former_history_a_snapshot_takes_the_place_of_what_was_committed() -> None:
    """What that accepted loss has given up, wherever the leader's log begins; and nothing later."""
    accepted = replace(RECORD, formers=(6,))
    log = {"start": 400, "end": END, "durable": END, "committed": 600}
    former = Follower(B, accepted, Epochs([(3, 0)]), former_to=600, **log)
    for greeting in (NeedsSnapshot(4, A, 0), Welcome(4, A, 592)):
        assert former.needs_snapshot(greeting)
    ahead = Follower(B, accepted, Epochs([(3, 0)]), former_to=END + 8, **log)
    assert ahead.needs_snapshot(Welcome(4, A, END))
    assert not former.needs_snapshot(Welcome(4, A, 600))
    assert former.welcome(Welcome(4, A, 600)) == 600
    later = Follower(B, accepted, Epochs([(3, 0)]), **log)
    with pytest.raises(Refused, match="lacks what is committed here"):
        later.needs_snapshot(NeedsSnapshot(4, A, 0))
    assert not later.needs_snapshot(Welcome(4, A, 592))
    with pytest.raises(Refused, match="of which 600 are committed"):
        later.welcome(Welcome(4, A, 592))


def test_what_its_log_could_not_give_up_is_told_again() -> None:
    epochs = Epochs([(1, 0), (3, 640)])
    known = {"start": 0, "end": END, "durable": END, "committed": 600}
    follower = Follower(B, RECORD, epochs, **known)
    assert follower.welcome(Welcome(4, A, 640)) == 640  # for which the disk has no space
    assert follower.answer() is None
    with pytest.raises(StreamBroken):
        follower.chunk(chunk(position=END))
    assert Follower(B, RECORD, epochs, **known).hello().epochs == ((1, 0), (3, 640))


def test_it_takes_nothing_before_the_welcome_and_answers_nothing() -> None:
    follower = following(welcomed=False)
    assert follower.answer() is None
    with pytest.raises(StreamBroken):
        follower.chunk(chunk(entries(END, 1)))


@pytest.mark.parametrize("known", [{"epoch": 3}, {"epoch": 5}, {"leader": B}, {"position": 808}])
def test_chunks_of_others_and_of_another_place_break_the_stream(known: dict[str, Any]) -> None:
    follower = following()
    with pytest.raises(StreamBroken):
        follower.chunk(chunk(**{"data": entries(END, 1)} | known))
    assert (follower.end, follower.committed) == (END, 600)


@pytest.mark.parametrize(
    "welcome", [Welcome(3, A, END), Welcome(4, B, END), Welcome(4, A, END + 8)]
)
def test_a_welcome_of_others_breaks_the_stream(welcome: Welcome) -> None:
    with pytest.raises(StreamBroken):
        following(welcomed=False).welcome(welcome)


@pytest.mark.parametrize(
    "data",
    [
        entries(END, 1)[:-1],
        entries(END, 1)[:-8] + bytes(8),
        entries(END + 8, 1),
        entries(END, 1, 1)[40:],
        entries(END, epoch.KIND, 1)[:-8],
    ],
)
def test_what_is_not_whole_breaks_the_stream_and_leaves_nothing(data: bytes) -> None:
    follower = following()
    with pytest.raises(StreamBroken):
        follower.chunk(chunk(data))
    assert (follower.end, follower.epochs.last) == (END, 3)


def test_epochs_are_read_off_the_entries() -> None:
    follower = following()
    data = entries(END, 1, epoch.KIND, 1)
    assert follower.chunk(chunk(data)) == Extend(END, memoryview(data), END + len(data))
    assert follower.epochs.begins[-1] == (5, END + 40)


def test_what_the_log_did_not_take_is_not_in_it_and_not_known_to_be_committed() -> None:
    follower = following()
    extend = follower.chunk(chunk(entries(END, 1, epoch.KIND), committed=10_000))
    assert extend is not None
    follower.not_taken(extend)
    assert (follower.end, follower.committed, follower.epochs.last) == (END, END, 3)


def test_what_is_committed_takes_effect_when_it_is_on_this_disk() -> None:
    follower = following()
    data = entries(END, 1)
    follower.chunk(chunk(data, committed=10_000))
    assert follower.committed == follower.end == END + len(data)
    assert follower.applicable == END
    follower.synced(follower.end)
    assert follower.applicable == follower.end
    follower.chunk(chunk(position=follower.end, committed=0))  # it never goes back
    assert follower.committed == follower.end


def test_it_answers_what_is_durable_and_which_chunk_it_got_last() -> None:
    follower = following(durable=640)
    assert follower.answer() == Answer(4, B, 640, 0)
    follower.chunk(chunk(entries(END, 1), sent_ms=77))
    assert follower.answer() == Answer(4, B, 640, 77)
    follower.synced(END)
    assert follower.answer() == Answer(4, B, END, 77)
    follower.short_of_space = True
    assert follower.answer() == Answer(4, B, END, 77, short_of_space=True)


def test_claims_are_covered_when_the_disk_has_what_the_leader_calls_committed() -> None:
    follower = following(committed=END)
    data = entries(END, 1)
    follower.chunk(chunk(data, committed=END + len(data)))
    assert not follower.covers_claims
    follower.synced(follower.end)
    assert follower.covers_claims
    follower.chunk(chunk(position=follower.end, committed=10_000))
    assert not follower.covers_claims


def test_it_hears_that_it_shall_lead() -> None:
    follower = following()
    assert not follower.asked_to_lead
    follower.chunk(chunk(take_over=True))
    assert follower.asked_to_lead


def test_what_came_on_a_stream_and_not_to_the_log_is_forgotten() -> None:
    epochs = Epochs([(1, 0), (4, 900)])
    Follower(B, RECORD, epochs, start=0, end=900, durable=900, committed=0)
    assert epochs.last == 1
