from __future__ import annotations

from dataclasses import replace

import pytest

from duemq_server.replication.protocol.in_sync import InSyncSet, InSyncState
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId

A, B, C = (ReplicaId(name, name * 32) for name in "abc")
RECORD = Record("g", 1, frozenset("abc"), frozenset({A, B}), 4, A)


def held(version: str, *in_sync: ReplicaId, epoch: int = 4) -> HeldRecord:
    record = replace(RECORD, in_sync=frozenset(in_sync), epoch=epoch, revision=9)
    return HeldRecord(version, record)


def test_while_a_change_is_under_way_old_and_new_count() -> None:
    known = InSyncSet("v1", RECORD, 2)
    swap = known.propose({A, C})
    assert (swap.version, swap.record.in_sync) == ("v1", {A, C})
    assert known.counted == {A, B, C}
    with pytest.raises(ValueError, match="another change"):
        known.propose({A})
    known.won(swap.number, "v2")
    assert (known.counted, known.state) == ({A, C}, InSyncState.SETTLED)
    assert known.propose({A, B}).version == "v2"


def test_a_change_that_was_not_made_still_counts_until_one_is() -> None:
    known = InSyncSet("v1", RECORD, 2)
    swap = known.propose({A, B, C})
    again = known.lost(swap.number, held("v2", A, B))
    assert again is not None
    assert (again.version, again.record.in_sync) == ("v2", {A, B})
    assert known.counted == {A, B, C}
    known.won(again.number, "v3")
    assert known.counted == {A, B}


def test_a_lost_answer_is_settled_by_the_next_change_and_by_no_read() -> None:
    known = InSyncSet("v1", RECORD, 2)
    swap = known.propose({A, B, C})
    known.unanswered(swap.number)
    assert known.state is InSyncState.UNKNOWN
    again = known.read(held("v1", A, B))  # the first may still be on its way
    assert again is not None
    assert (again.version, known.counted) == ("v1", {A, B, C})
    known.won(swap.number, "late")  # nobody waits for that one any more
    assert known.state is InSyncState.ASKED
    third = known.lost(again.number, held("v2", A, B, C))  # it was the first that was done
    assert third is not None
    known.won(third.number, "v3")
    assert known.counted == {A, B, C}
    assert third.record.revision > 9


def test_a_read_changes_nothing_while_all_is_known() -> None:
    known = InSyncSet("v1", RECORD, 2)
    assert known.read(held("v1", A, B)) is None
    assert (known.state, known.deposed) == (InSyncState.SETTLED, False)


@pytest.mark.parametrize("found", [None, held("v7", B, epoch=5)])
def test_who_finds_another_epoch_is_deposed(found: HeldRecord | None) -> None:
    known = InSyncSet("v1", RECORD, 2)
    assert known.read(found) is None
    assert known.deposed
    known = InSyncSet("v1", RECORD, 2)
    assert known.lost(known.propose({A}).number, found) is None
    assert known.deposed


def test_each_set_that_there_may_be_must_be_large_enough() -> None:
    known = InSyncSet("v1", replace(RECORD, in_sync=frozenset({A})), 2)
    assert not known.enough
    swap = known.propose({A, B})
    assert not known.enough
    known.won(swap.number, "v2")
    assert known.enough


def test_a_store_that_reads_and_does_not_write_leaves_no_more_and_more_behind() -> None:
    known = InSyncSet("v1", RECORD, 2)
    known.unanswered(known.propose({A, B, C}).number)
    sizes = set()
    for _ in range(5):
        swap = known.read(held("v1", A, B))
        assert swap is not None
        known.unanswered(swap.number)
        sizes.add(len(known._possible))
    assert sizes == {2}
    assert known.counted == {A, B, C}


def test_a_record_that_was_set_back_within_the_epoch_is_written_again() -> None:
    """C was in sync in the backup: it must not stand by that, for it lacks what came since."""
    known = InSyncSet("v9", RECORD, 2)
    again = known.read(held("v1", A, B, C))
    assert again is not None
    assert (again.version, again.record.in_sync) == ("v1", {A, B})
    assert again.record.revision > 9
    assert known.counted == {A, B, C}  # until it is done, C may stand
    known.won(again.number, "v10")
    assert (known.counted, known.state) == ({A, B}, InSyncState.SETTLED)
    assert known.read(held("v10", A, B)) is None


def test_a_change_that_meets_a_record_that_was_set_back_takes_over_nothing_of_it() -> None:
    known = InSyncSet("v9", RECORD, 1)
    again = known.lost(known.propose({A}).number, held("v1", A, B, C))
    assert again is not None
    assert (again.version, again.record.in_sync) == ("v1", {A, B})
    assert known.counted == {A, B, C}
