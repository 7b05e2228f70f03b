"""HOLD (kind 28): timers of a topic are kept back, or go again.  Little-endian; see log_entries.py.

off  size  field          meaning
 0    8    at_ms          when it was decided, Unix ms
 8    4    number         of the hold; never given again
12    1    what           1: kept back; 2: they go again; 3: they will, without some of them
13    1    policy         with 3: which go: 1: the newest of a key; 2: those that are not too old
14    2    topic_length
16    2    prefix_length  0: the whole topic
18    6    reserved       zeros
24    8    older_ms       with policy 2: how much sooner than `at_ms` one was due that is too old
32    n    topic, prefix of timer_key: UTF-8, together zero-padded to a multiple of 8
"""

from __future__ import annotations

import struct
from typing import NamedTuple

HELD, RESUMED, RESUMING = 1, 2, 3
ALL, NEWEST, DROP_OLDER = 0, 1, 2
"""Policies: which of those that fell due meanwhile go."""

_HEADER = struct.Struct("<qIBBHH6xq")
assert _HEADER.size == 32


class Hold(NamedTuple):
    """What is kept back: timers of a topic; with a prefix those whose timer_key begins so."""

    number: int
    topic: str
    prefix: str
    since_ms: int
    policy: int = ALL
    """Not ALL: it is being resumed, and those that do not go are being dropped."""
    asked_ms: int = 0
    """When that was asked for."""
    older_ms: int = 0


class HoldChange(NamedTuple):
    """What an entry says."""

    what: int
    hold: Hold


def encode(change: HoldChange) -> bytes:
    """A body."""
    hold = change.hold
    at_ms = hold.asked_ms if change.what == RESUMING else hold.since_ms
    topic, prefix = hold.topic.encode(), hold.prefix.encode()
    lengths = len(topic), len(prefix)
    header = _HEADER.pack(at_ms, hold.number, change.what, hold.policy, *lengths, hold.older_ms)
    text = topic + prefix
    return header + text + bytes(-len(text) % 8)


def decode(body: memoryview) -> HoldChange:
    """Reads a body; with RESUMING `since_ms` is not in it."""
    at_ms, number, what, policy, topic_length, prefix_length, older_ms = _HEADER.unpack_from(body)
    text = bytes(body[_HEADER.size : _HEADER.size + topic_length + prefix_length])
    topic, prefix = text[:topic_length].decode(), text[topic_length:].decode()
    hold = Hold(number, topic, prefix, at_ms)
    if what == RESUMING:
        hold = Hold(number, topic, prefix, 0, policy, at_ms, older_ms)
    return HoldChange(what, hold)
