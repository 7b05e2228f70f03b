"""BULK (kind 26): a job on what is pending of a topic.  Little-endian; see log_entries.py.

off  size  field     meaning
 0   16    job       its id: its request's
16    4    what      1: accepted, or open again; 2: a slice is cancelled; 3: one is changed; 4: over
20    4    timers    of a slice
24    8    at_ms     when it was decided, Unix ms
32    n    body      accepted: the job as JSON (jobs.py), zero-padded to a multiple of 8
                     cancelled: as CANCEL's
                     shifted, moved: as SCHEDULE's (keyed_entry.py), without request and answer
                     over: what could not be read, UTF-8; mostly nothing

A crash leaves a slice whole or not at all.
"""

from __future__ import annotations

import json
import struct
from typing import NamedTuple

from duemq_server.timer_service.scheduling.bulk.jobs import Job

ACCEPTED, CANCELLED, SHIFTED, OVER = 1, 2, 3, 4
HEADER = struct.Struct("<16sIIq")
assert HEADER.size == 32


class Bulk(NamedTuple):
    """What an entry says; `body` of a slice."""

    job: bytes
    what: int
    timers: int
    at_ms: int
    body: memoryview


def accepted(job: Job, now_ms: int) -> bytes:
    """A job begins."""
    text = json.dumps(job.to_json()).encode()
    return HEADER.pack(job.id, ACCEPTED, 0, now_ms) + text.ljust(-(-len(text) // 8) * 8)


def slice_of(job: Job, what: int, timers: int, now_ms: int) -> bytes:
    """What is in front of a slice's body."""
    return HEADER.pack(job.id, what, timers, now_ms)


def over(job: Job, problem: str, now_ms: int) -> bytes:
    """A job ends."""
    return HEADER.pack(job.id, OVER, 0, now_ms) + problem.encode()


def decode(body: memoryview) -> Bulk:
    """Reads a body."""
    job, what, timers, at_ms = HEADER.unpack_from(body)
    return Bulk(job, what, timers, at_ms, body[HEADER.size :])


def decode_job(found: Bulk) -> Job:
    """Of an entry that says that a job was accepted."""
    return Job.from_json(json.loads(bytes(found.body)))
