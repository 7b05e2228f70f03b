"""Delayed messages under keys of their owner: what is asked of a shard, and what it answers.  Pure.

A key is unique in its topic while its message waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from duemq.errors import DuemqError
from duemq_server.timer_service.timers.log_entries import Cancelled

Handle = Cancelled
"""Names any timer: where it came from, and when it is due."""

SCHEDULED, REPLACED, EXISTS = "SCHEDULED", "REPLACED", "EXISTS"
RESCHEDULED, FIRED, UNKNOWN = "RESCHEDULED", "FIRED", "UNKNOWN"


class TimerKey(NamedTuple):
    """Where an owner's timer waits."""

    topic: str
    key: str


class KeyedRecords(NamedTuple):
    """Records to be kept under keys; columns have an entry a record."""

    topic: str
    queue_id: int  # -1: any
    broker: str  # whose queue it is; empty where any will do
    keys: Sequence[str]  # none twice; as the records have them
    records: bytes  # encoding of a RecordBatch
    sizes: Sequence[int]  # bytes of each record's entry in it
    tag_hashes: Sequence[int]  # record_bytes.text_hash
    key_hashes: Sequence[int]  # of Record.key
    due_ms: Sequence[int]


class ScheduleResult(NamedTuple):
    """Of a record: SCHEDULED, REPLACED or EXISTS."""

    outcome: str
    handle: Handle  # the new one; with EXISTS of what is there
    replaced: Handle | None = None  # with REPLACED


class RescheduleResult(NamedTuple):
    """Of a timer: RESCHEDULED, FIRED or UNKNOWN, or else an error."""

    outcome: str
    handle: Handle | None = None  # with RESCHEDULED: the new one
    error: DuemqError | None = None
