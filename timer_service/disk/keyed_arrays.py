"""Arrays of a checkpoint that only a shard with timers under keys has; see checkpoint_state.py.

request_slots    i64  ten seconds since 1970, their requests: a pair each
request_lengths  u32  of name and answer: a pair a request
request_names    u8   keyed_entry.RequestKey.name
request_answers  u8   keyed_entry.encode_answer
ended_keys       u64  hashes, the one that ended first at the front
ended_ms         i64  when
ended_fired      u8   1: it fired; 0: it was cancelled
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.scheduling.keyed.ended_keys import SavedKey
from duemq_server.timer_service.scheduling.keyed.request_memory import SavedRequests

Arrays = dict[str, npt.NDArray[Any]]


def encode(requests: Sequence[SavedRequests], ended: Sequence[SavedKey]) -> Arrays:
    """None where there is nothing."""
    arrays: Arrays = {}
    if requests:
        names = [name for each in requests for name in each.answers]
        answers = [answer for each in requests for answer in each.answers.values()]
        slots = [(each.slot, len(each.answers)) for each in requests]
        lengths = [(len(name), len(answer)) for name, answer in zip(names, answers, strict=True)]
        arrays["request_slots"] = np.array(slots, dtype=np.int64).reshape(-1)
        arrays["request_lengths"] = np.array(lengths, dtype=np.uint32).reshape(-1)
        arrays["request_names"] = np.frombuffer(b"".join(names), dtype=np.uint8)
        arrays["request_answers"] = np.frombuffer(b"".join(answers), dtype=np.uint8)
    if ended:
        arrays["ended_keys"] = np.array([each.hashed for each in ended], dtype=np.uint64)
        arrays["ended_ms"] = np.array([each.at_ms for each in ended], dtype=np.int64)
        arrays["ended_fired"] = np.array([each.fired for each in ended], dtype=np.uint8)
    return arrays


def decode_requests(arrays: Arrays) -> list[SavedRequests]:
    """Reads the requests."""
    if "request_slots" not in arrays:
        return []
    lengths = iter(arrays["request_lengths"].reshape(-1, 2).tolist())
    names, answers = arrays["request_names"].tobytes(), arrays["request_answers"].tobytes()
    saved, name_at, answer_at = [], 0, 0
    for slot, count in arrays["request_slots"].reshape(-1, 2).tolist():
        found: dict[bytes, bytes] = {}
        for name_length, answer_length in itertools.islice(lengths, count):
            name = names[name_at : name_at + name_length]
            found[name] = answers[answer_at : answer_at + answer_length]
            name_at += name_length
            answer_at += answer_length
        saved.append(SavedRequests(slot, found))
    return saved


def decode_ended(arrays: Arrays) -> list[SavedKey]:
    """Reads the keys under which nothing waits."""
    if "ended_keys" not in arrays:
        return []
    columns = (arrays[name].tolist() for name in ("ended_keys", "ended_ms", "ended_fired"))
    ended = zip(*columns, strict=True)
    return [SavedKey(hashed, at_ms, bool(fired)) for hashed, at_ms, fired in ended]
