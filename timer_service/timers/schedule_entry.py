"""RECUR (kind 22): schedules that are made, move on, or go, with their timers.  Little-endian.

One entry moves schedules on *and* brings their next timers in *and* takes others away: a crash
leaves the whole of it or nothing.  Occurrences are not computed again from it.

 0    4    changes     of schedules
 4    4    reserved    zeros
 8    8    length      of the changes
16    n    changes
 .    n    a SCHEDULE body (keyed_entry.py) without request, hashes, answer

A change, also a schedule of a checkpoint, is
 0    1    what        1: made or changed; 2: moved on; 3: deleted
 1    1    paused
 2    2    name_length
 4    4    plan_length    0 unless made, or it has more state
 8    4    record_length  0 unless made
12    4    came           of its timers; all of them in a checkpoint
16    8    cursor_ms      occurrences up to then wait, were stored, or are left out
24    8    stored         messages since it was made
32    8    left_ms        of the last one that was dispatched, or cancelled by its handle
40   40*c  came           store_id u64, queue_id u32, zeros u32, offset i64, at_ms i64, due_ms i64
 .    n    name; plan, a JSON object; record: together zero-padded to a multiple of 8

The plan's object has the fields of duemq_recurring's Recurrence and Plan, but for the record.  Of
one that moved on an object stands in its place with `left_out` and `all_until_ms` of its State, if
it has any: releases before do not look at it.  So a schedule of a checkpoint that has some is made
and moved.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from duemq_recurring.occurrences import CatchUp, Recurrence
from duemq_recurring.schedule import (
    MADE,
    MOVED,
    PendingMessage,
    Plan,
    ScheduleChange,
    ScheduleState,
)
from duemq_recurring.wall_clock import Dst
from duemq_server.timer_service.timers.log_entries import SourceId

_HEADER = struct.Struct("<IIQ")
_CHANGE = struct.Struct("<BBHIIIqqq")
_PENDING = struct.Struct("<QIIqqq")
assert (_HEADER.size, _CHANGE.size, _PENDING.size) == (16, 40, 40)


def encode(
    changes: Sequence[ScheduleChange], timers: Sequence[bytes | memoryview]
) -> list[bytes | memoryview]:
    """Parts of a body; `timers`: those of the SCHEDULE body."""
    data = encode_changes(changes)
    return [_HEADER.pack(len(changes), 0, len(data)) + data + timers[0], *timers[1:]]


def decode(body: memoryview) -> tuple[list[ScheduleChange], int]:
    """The changes, and where the SCHEDULE body begins."""
    count, _, length = _HEADER.unpack_from(body)
    end = _HEADER.size + length
    changes = decode_changes(body[_HEADER.size : end])
    if len(changes) != count:
        raise ValueError(f"{len(changes)} schedules where {count} are announced")
    return changes, end


def encode_changes(changes: Iterable[ScheduleChange]) -> bytes:
    """One after the other."""
    return b"".join(_encode_change(each) for each in changes)


def _encode_change(change: ScheduleChange) -> bytes:
    plan = change.plan
    name, record = change.name.encode(), b"" if plan is None else plan.record
    text = _text_of(plan) if plan is not None else _more_of(change.state)
    header = _CHANGE.pack(
        change.what,
        change.state.paused,
        len(name),
        len(text),
        len(record),
        len(change.came),
        change.state.cursor_ms,
        change.state.stored,
        change.state.left_ms,
    )
    came = [_PENDING.pack(*p.source, 0, p.offset, p.at_ms, p.due_ms) for p in change.came]
    data = b"".join((header, *came, name, text, record))
    return data + bytes(-len(data) % 8)


def decode_changes(data: bytes | memoryview) -> list[ScheduleChange]:
    """Reads `encode_changes`'s bytes.  Raises ValueError."""
    view, at, changes = memoryview(data), 0, []
    while at < len(view):
        fields = _CHANGE.unpack_from(view, at)
        what, paused, name, plan, record, came, cursor_ms, stored, left_ms = fields
        pending_at = at + _CHANGE.size
        name_at = pending_at + _PENDING.size * came
        plan_at, record_at = name_at + name, name_at + name + plan
        pending = tuple(
            PendingMessage(SourceId(store_id, queue_id), offset, at_ms, due_ms)
            for store_id, queue_id, _, offset, at_ms, due_ms in _PENDING.iter_unpack(
                view[pending_at:name_at]
            )
        )
        text, body = bytes(view[plan_at:record_at]), bytes(view[record_at : record_at + record])
        more = _more_from(text) if text and what == MOVED else {}
        changes.append(
            ScheduleChange(
                str(view[name_at:plan_at], "utf-8"),
                what,
                ScheduleState(
                    bool(paused),
                    cursor_ms,
                    stored,
                    left_ms,
                    tuple(more.get("left_out", ())),
                    more.get("all_until_ms", 0),
                ),
                pending,
                _plan_of(text, body) if what == MADE else None,
            )
        )
        at = record_at + record
        at += -at % 8
    return changes


def _text_of(plan: Plan) -> bytes:
    fields = dataclasses.asdict(plan)
    del fields["record"]
    return json.dumps(fields, separators=(",", ":")).encode()


def _more_of(state: ScheduleState) -> bytes:
    """What is seldom there."""
    more = {"left_out": state.left_out, "all_until_ms": state.all_until_ms}
    return json.dumps(more, separators=(",", ":")).encode() if any(more.values()) else b""


def _more_from(text: bytes) -> dict[str, Any]:
    more = json.loads(text)
    if isinstance(more, dict):
        return more
    # The release before wrote a list of what is left out; below 0: until when all comes.
    left_out = [each for each in more if each >= 0]
    return {"left_out": left_out, "all_until_ms": max(0, -min(more, default=0))}


def _plan_of(text: bytes, record: bytes) -> Plan:
    fields = json.loads(text)
    when = fields.pop("recurrence")
    when["dst"], when["catch_up"] = Dst(when["dst"]), CatchUp(when["catch_up"])
    return Plan(recurrence=Recurrence(**when), record=record, **fields)
