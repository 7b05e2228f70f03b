from __future__ import annotations

from dataclasses import replace

import pytest

from duemq_server.replication.protocol.election import Decision, Election
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId
from duemq_server.replication.protocol.times import Times

A, B, C = (ReplicaId(name, name * 32) for name in "abc")
RECORD = Record("g", 7, frozenset("abc"), frozenset({A, B}), 4, A)
TIMES = Times()
NOW_MS = 1_000_000
JITTER = 0.5
JITTER_MS = 150
WAIT, STAND = Decision.WAIT, Decision.STAND


def waiting(me: ReplicaId = B, lease: str | None = "1", record: Record = RECORD) -> Election:
    election = Election(me, lambda: JITTER, TIMES)
    election.saw(HeldRecord("v1", record, lease), NOW_MS)
    return election


def test_a_lease_that_stands_still_for_its_duration_has_ended() -> None:
    election = waiting()
    end_ms = NOW_MS + TIMES.lease_ms + JITTER_MS
    assert election.decide(end_ms - 1) is WAIT
    assert election.decide(end_ms) is STAND


def test_a_lease_that_is_renewed_has_not_ended() -> None:
    election = waiting()
    for seconds in range(60):
        election.saw(HeldRecord("v1", RECORD, str(seconds)), NOW_MS + 1_000 * seconds)
        assert election.decide(NOW_MS + 1_000 * seconds + 999) is WAIT


def test_a_read_that_shows_nothing_new_does_not_renew_it() -> None:
    election = waiting()
    end_ms = NOW_MS + TIMES.lease_ms + JITTER_MS
    election.saw(HeldRecord("v1", RECORD, "1"), end_ms - 1)
    assert election.decide(end_ms) is STAND


def test_a_lease_that_the_store_says_has_ended_is_not_waited_for() -> None:
    election = waiting(lease=None)
    assert election.decide(NOW_MS + JITTER_MS - 1) is WAIT
    assert election.decide(NOW_MS + JITTER_MS) is STAND


def test_a_leader_whose_process_is_dead_is_not_waited_for_though_it_was_heard() -> None:
    election = waiting()
    election.heard(NOW_MS)
    election.saw(HeldRecord("v1", RECORD, None, dead=True), NOW_MS + 1)
    assert election.decide(NOW_MS + JITTER_MS) is WAIT
    assert election.decide(NOW_MS + JITTER_MS + 1) is STAND


def test_who_hears_the_leader_does_not_stand() -> None:
    election = waiting(lease=None)
    for second in range(1, 30):
        now_ms = NOW_MS + 900 * second
        election.heard(now_ms)
        assert election.decide(now_ms + 100) is WAIT
    assert election.decide(now_ms + TIMES.heard_ms - 1) is WAIT
    assert election.decide(now_ms + TIMES.heard_ms) is STAND


def test_who_is_asked_stands_at_once_while_the_record_is_as_it_was() -> None:
    election = waiting()
    election.heard(NOW_MS)
    election.asked()
    assert election.decide(NOW_MS) is STAND
    election.saw(HeldRecord("v2", replace(RECORD, leader=C), "1"), NOW_MS)
    assert election.decide(NOW_MS) is WAIT


@pytest.mark.parametrize("leader", [None, B])
def test_where_nobody_else_leads_nothing_is_waited_for(leader: ReplicaId | None) -> None:
    election = waiting(record=replace(RECORD, leader=leader))
    assert election.decide(NOW_MS + JITTER_MS) is STAND


def test_who_is_not_in_sync_never_stands() -> None:
    assert waiting(me=C, lease=None).decide(NOW_MS + 1_000_000) is WAIT
    election = waiting()
    election.saw(None, NOW_MS)
    assert election.decide(NOW_MS + 1_000_000) is WAIT


def test_a_group_that_is_being_founded_waits_for_all() -> None:
    founding = replace(RECORD, epoch=0, leader=None)
    assert waiting(record=founding).decide(NOW_MS + 1_000_000) is WAIT
    whole = replace(founding, in_sync=frozenset({A, B, C}))
    assert waiting(record=whole).decide(NOW_MS + JITTER_MS) is STAND


def test_a_copy_of_the_disk_that_leads_waits_for_its_lease_and_is_seen() -> None:
    record = replace(RECORD, address="a:1")
    copy = Election(A, lambda: JITTER, TIMES, "elsewhere:1")
    copy.saw(HeldRecord("v1", record, "1"), NOW_MS)
    assert not copy.doubled  # it may have been here, under another address
    end_ms = NOW_MS + TIMES.lease_ms + JITTER_MS
    assert copy.decide(end_ms - 1) is WAIT
    assert copy.decide(end_ms) is STAND
    copy.saw(HeldRecord("v1", record, "2"), end_ms)
    assert copy.doubled
    assert copy.decide(end_ms + JITTER_MS) is WAIT
    copy.saw(HeldRecord("v2", replace(record, leader=B), "3"), end_ms)
    assert not copy.doubled


def test_a_disk_that_led_elsewhere_and_died_is_not_waited_for() -> None:
    moved = Election(A, lambda: JITTER, TIMES, "elsewhere:1")
    moved.saw(HeldRecord("v1", replace(RECORD, address="a:1"), None, dead=True), NOW_MS)
    assert moved.decide(NOW_MS + JITTER_MS) is STAND


def test_a_leader_that_is_started_anew_is_no_copy() -> None:
    again = Election(A, lambda: JITTER, TIMES, "a:1")
    again.saw(HeldRecord("v1", replace(RECORD, address="a:1"), "1"), NOW_MS)
    again.saw(HeldRecord("v1", replace(RECORD, address="a:1"), "2"), NOW_MS)
    assert not again.doubled
    assert again.decide(NOW_MS + JITTER_MS) is STAND
