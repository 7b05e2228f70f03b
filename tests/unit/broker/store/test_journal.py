from __future__ import annotations

import json

from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq_server.broker.records.timer_claims import Service
from duemq_server.broker.records.timer_owners import TimerOwners
from duemq_server.broker.store import journal

LEADING = Service(SERVICE_IDS_FROM, "t2", 1, 2)
LEAVING = Service(SERVICE_IDS_FROM, "t2", 1, 1, empty=True)
# The release before the one that knows `empty` makes a Service of all fields that it finds.
FIELDS_BEFORE = {"id", "name", "shard", "shards", "key_shards"}


def test_the_release_before_reads_that_a_timer_service_is_empty() -> None:
    body = journal.timer_claimed(LEAVING, [], 7, [(1, 70)])
    fields = json.loads(body)
    assert fields.keys() - {"queues", "since_ms", "begins"} <= FIELDS_BEFORE
    assert all(isinstance(each, int) for row in fields["begins"] for each in row)
    assert journal.read_timer_claimed(memoryview(body)) == (LEAVING, [], 7, [(1, 70)], None)


def test_the_release_before_reads_in_which_epoch_a_timer_service_is_led() -> None:
    body = journal.timer_claimed(LEADING, [1], 7, [(1, 70)], epoch=5)
    fields = json.loads(body)
    assert fields.keys() - {"queues", "since_ms", "begins"} <= FIELDS_BEFORE
    assert all(isinstance(each, int) for row in fields["begins"] for each in row)
    assert journal.read_timer_claimed(memoryview(body)) == (LEADING, [1], 7, [(1, 70)], 5)
    assert b"begins" not in journal.timer_claimed(LEADING, [1], 7)  # as ever, without replicas


def test_a_checkpoint_with_an_epoch_is_read_by_the_release_before() -> None:
    owners = TimerOwners()
    owners.put(LEADING, [1], 7, epoch=5)
    data = json.loads(json.dumps(owners.encode()))
    assert data["claims"][0][0].keys() <= FIELDS_BEFORE
    assert len(data["claims"][0]) == 4
    again = TimerOwners()
    again.load(data)
    assert again.encode() == owners.encode()


def test_what_the_release_before_made_of_it_says_nothing_of_a_queue() -> None:
    owners = TimerOwners()
    owners.load({"claims": [], "begins": [[-1, 0], [-2, 5], [3, 70]]})
    assert owners.encode()["begins"] == [[3, 70]]


def test_a_checkpoint_with_a_timer_service_that_is_empty_is_read_by_the_release_before() -> None:
    owners = TimerOwners()
    owners.put(LEAVING, [], 7)
    data = json.loads(json.dumps(owners.encode()))
    assert data["claims"][0][0].keys() <= FIELDS_BEFORE
    again = TimerOwners()
    again.load(data)
    assert again.encode() == owners.encode()
    assert again.holders() == []


def test_what_a_later_release_says_of_a_timer_service_is_passed_over() -> None:
    fields = {**json.loads(journal.timer_claimed(LEAVING, [], 7)), "later": [1], "empty": True}
    body = json.dumps({**fields, "begins": []}).encode()
    assert journal.read_timer_claimed(memoryview(body)) == (LEAVING, [], 7, [], None)
