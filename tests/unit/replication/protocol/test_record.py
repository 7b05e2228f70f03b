from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.record import MemberChange, Record, Refused, ReplicaId
from duemq_server.storage import record as entries
from duemq_server.storage.errors import UnknownVersion

A, B, C = (ReplicaId(name, name * 32) for name in "abc")
NAMES = frozenset("abc")
RECORD = Record("orders", 7, NAMES, frozenset({A, B, C}), 4, A, "a:1", registered_ms=1_000)


def announced(record: Record | None, me: ReplicaId, log_end: int = 0) -> Record | None:
    return records.announced(
        record, group="orders", members=NAMES, me=me, store_id=7, log_end=log_end
    )


def taken_over(record: Record, me: ReplicaId, **known: Any) -> Record:
    known = {"address": "x:1", "last_epoch": 0, "min_insync": 2, "now_ms": 5_000} | known
    return records.taken_over(record, me, **known)


def test_a_record_is_read_as_it_was_written() -> None:
    assert records.decode(records.encode(RECORD)) == RECORD
    empty = Record("g", 1, frozenset("a"), frozenset())
    assert records.decode(records.encode(empty)) == empty


def test_a_record_of_a_newer_release_is_not_taken_for_another() -> None:
    with pytest.raises(UnknownVersion, match="format 2"):
        records.decode(records.encode(RECORD).replace(b'"format":1', b'"format":2'))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format":1}', b'{"format":1,"leader":[1]}'])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"no record|Expecting"):
        records.decode(data)


def test_a_record_is_bounded() -> None:
    many = frozenset(ReplicaId(f"replica-{n}", f"{n:032x}") for n in range(40))
    with pytest.raises(ValueError, match="exceeds 2048"):
        records.encode(replace(RECORD, in_sync=many))


# -- founding


def test_a_group_is_founded_when_all_are_there() -> None:
    record = announced(None, A)
    assert record is not None
    assert (record.epoch, record.in_sync, record.missing) == (0, {A}, ["b", "c"])
    with pytest.raises(Refused, match="waiting for b, c"):
        taken_over(record, A)
    record = announced(record, B)
    assert record is not None
    assert announced(record, B) is None
    record = announced(record, C)
    assert record is not None
    first = taken_over(record, B)
    assert (first.epoch, first.leader, first.in_sync) == (1, B, {A, B, C})
    assert announced(first, ReplicaId("a", "anew")) is None


def test_an_emptied_replica_takes_its_own_place_while_the_group_is_founded() -> None:
    record = announced(announced(None, A), B)
    anew = ReplicaId("a", "anew")
    assert announced(record, anew).in_sync == {anew, B}


@pytest.mark.parametrize("record", [None, Record("orders", 7, NAMES, frozenset({B}))])
def test_a_log_that_is_not_empty_founds_nothing(record: Record | None) -> None:
    with pytest.raises(Refused, match=r"holds 64 bytes.*duemq replica adopt"):
        announced(record, A, log_end=64)


def test_a_stranger_founds_nothing() -> None:
    with pytest.raises(Refused, match="none of the group's members"):
        announced(None, ReplicaId("x", "x"))


def test_an_operator_adopts_a_log() -> None:
    known = {"group": "orders", "members": NAMES, "me": A, "store_id": 7}
    adopted = records.adopted(None, last_epoch=9, **known)
    assert (adopted.epoch, adopted.leader, adopted.in_sync) == (9, None, {A})
    assert taken_over(adopted, A, last_epoch=9).epoch == 10
    beyond = records.adopted(None, last_epoch=9, leap=records.LEAP_MIN, **known)
    assert taken_over(beyond, A, last_epoch=9).epoch == 10 + records.LEAP_MIN
    again = records.adopted(replace(RECORD, epoch=20), last_epoch=9, **known)
    assert (again.epoch, again.registered_ms) == (20, RECORD.registered_ms)
    assert again.revision > RECORD.revision


def test_who_adopts_a_log_where_the_record_was_set_back_knows_that_ones_id() -> None:
    """Its file of former ids may be lost; what waits under that id is answered for all the same."""
    of_group = {"group": "orders", "members": NAMES, "me": A, "last_epoch": 9}
    before = replace(RECORD, store_id=5, formers=(4,))
    assert records.adopted(before, store_id=7, **of_group).formers == (4, 5)
    assert records.adopted(before, store_id=7, formers=(4, 6), **of_group).formers == (4, 6, 5)
    assert records.adopted(before, store_id=5, **of_group).formers == (4,)


# -- taking over


def test_who_is_in_sync_takes_over_and_the_old_leader_leaves_the_set() -> None:
    taken = taken_over(RECORD, B)
    assert (taken.epoch, taken.leader, taken.address, taken.in_sync) == (5, B, "x:1", {B, C})
    assert taken.revision == RECORD.revision + 1


def test_the_old_leader_stays_where_too_few_would_be_left() -> None:
    two = replace(RECORD, in_sync=frozenset({A, B}))
    assert taken_over(two, B).in_sync == {A, B}
    assert taken_over(two, B, min_insync=1).in_sync == {B}


def test_a_leader_that_starts_again_begins_a_new_epoch() -> None:
    again = taken_over(RECORD, A)
    assert (again.epoch, again.leader, again.in_sync) == (5, A, {A, B, C})


@pytest.mark.parametrize("me", [ReplicaId("b", "anew"), ReplicaId("x", "x")])
def test_who_is_not_in_sync_takes_nothing_over(me: ReplicaId) -> None:
    with pytest.raises(Refused, match="is not in sync"):
        taken_over(RECORD, me)


def test_a_log_of_a_newer_release_is_not_taken_over() -> None:
    with pytest.raises(Refused, match="version 2, and this release reads up to 1: start the newer"):
        taken_over(replace(RECORD, log_version=2), B)


def test_the_log_is_of_the_version_that_storage_writes() -> None:
    """More is written when all members read it: then `log_version` of the record is raised."""
    assert entries.VERSION == records.LOG_VERSION


def test_a_store_that_was_set_back_is_not_taken_over() -> None:
    with pytest.raises(Refused, match="the store was set back"):
        taken_over(RECORD, B, last_epoch=5)
    assert taken_over(RECORD, B, last_epoch=4).epoch == 5


def test_takeovers_are_registered_in_their_order_whatever_the_clock_says() -> None:
    assert taken_over(RECORD, B, now_ms=5_000).registered_ms == 5_000
    assert taken_over(RECORD, B, now_ms=10).registered_ms == 1_001


def test_an_election_that_accepts_a_loss_is_of_another_store() -> None:
    lost = ReplicaId("c", "old")
    elected = records.elected(RECORD, lost, store_id=8, last_epoch=6, leap=100)
    assert (elected.store_id, elected.epoch, elected.in_sync) == (8, 107, {lost})
    assert elected.formers == (7,)
    assert taken_over(elected, lost, last_epoch=6, min_insync=1).leader == lost
    with pytest.raises(Refused, match="new store_id"):
        records.elected(RECORD, lost, store_id=7, last_epoch=6, leap=100)


# -- by the leader


def test_a_leader_stays_in_its_set() -> None:
    assert records.with_in_sync(RECORD, frozenset({A})).in_sync == {A}
    with pytest.raises(Refused, match="is in its set"):
        records.with_in_sync(RECORD, frozenset({B}))


def test_members_come_and_go() -> None:
    more = records.with_member(RECORD, "d")
    assert more.missing == ["d"]
    assert records.without_member(more, "d", 2).members == NAMES
    fewer = records.without_member(RECORD, "c", 2)
    assert (fewer.members, fewer.in_sync) == ({"a", "b"}, {A, B})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (MemberChange("a", joins=False), "a leads orders: let another one lead first"),
        (MemberChange("a", joins=False, accepted=True), "a leads orders"),
        (MemberChange("z", joins=False), "z is no member of orders: members are a, b, c"),
        (MemberChange("b", joins=True), "b is a member of orders already"),
        (MemberChange("b", joins=False), "at most 1 would be in sync: min_insync is 2"),
    ],
)
def test_a_change_of_members_that_may_not_be_is_refused(change: MemberChange, told: str) -> None:
    record = replace(RECORD, in_sync=frozenset({A, B}))
    with pytest.raises(Refused, match=told):
        records.with_change(record, change, 2)


def test_fewer_than_min_insync_are_left_when_that_is_accepted() -> None:
    two = replace(RECORD, members=frozenset("ab"), in_sync=frozenset({A, B}))
    one = records.with_change(two, MemberChange("b", joins=False, accepted=True), 2)
    assert (one.members, one.in_sync) == ({"a"}, {A})
    absent = replace(two, in_sync=frozenset({A}))
    with pytest.raises(Refused, match="--accept"):
        records.with_change(absent, MemberChange("b", joins=False), 2)
    assert records.with_change(absent, MemberChange("b", joins=False), 1).members == {"a"}


def test_a_group_has_a_limit_of_members() -> None:
    names = [chr(ord("a") + number) for number in range(records.MEMBERS_MAX)]
    full = replace(RECORD, members=frozenset(names))
    with pytest.raises(Refused, match="7 members, and no more"):
        records.with_change(full, MemberChange("z", joins=True), 2)


def test_who_is_elected_is_a_member() -> None:
    stranger = ReplicaId("z", "z" * 32)
    assert records.elected(RECORD, stranger, 9, 0, 100).members == {*NAMES, "z"}


def test_who_could_not_lead_is_not_elected() -> None:
    """The set would be gone, and nobody could take the record over."""
    with pytest.raises(Refused, match="version 2, and this release reads up to 1"):
        records.elected(replace(RECORD, log_version=2), A, 9, 0, 100)
    names = frozenset(chr(ord("a") + number) for number in range(records.MEMBERS_MAX))
    full = replace(RECORD, members=names)
    with pytest.raises(Refused, match="7 members, and no more may be: a, b"):
        records.elected(full, ReplicaId("z", "z" * 32), 9, 0, 100)
    assert records.elected(full, A, 9, 0, 100).members == names


def test_every_change_has_another_revision() -> None:
    changes = [
        taken_over(RECORD, A),
        records.with_in_sync(RECORD, RECORD.in_sync),
        records.with_member(RECORD, "d"),
        records.without_member(RECORD, "c", 2),
        records.elected(RECORD, A, 9, 0, 100),
    ]
    assert all(each.revision == RECORD.revision + 1 for each in changes)
