"""Repeated numbers of a protobuf message as arrays, without an object a number.

protobuf's containers give their numbers one by one, which was half of decoding a span.  Their wire
form is an array already: all fixed64 in a row, or varints, which mostly are a byte each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_ZIGZAG = frozenset({FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64})
_FIXED = frozenset({FieldDescriptor.TYPE_FIXED64})
_UNSIGNED = frozenset(
    {FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_UINT32}
)


def numbers(owner: Message, name: str) -> np.ndarray[Any, Any]:
    """The field's numbers: uint64 where it is unsigned, else int64."""
    kind = owner.DESCRIPTOR.fields_by_name[name].type
    carrier = type(owner)()
    getattr(carrier, name).MergeFrom(getattr(owner, name))
    payload = _payload(carrier.SerializeToString())
    if kind in _FIXED:
        return payload.view("<u8")
    found = _varints(payload)
    if kind in _ZIGZAG:
        return (found >> np.uint64(1)).view(np.int64) ^ -(found & np.uint64(1)).view(np.int64)
    return found if kind in _UNSIGNED else found.view(np.int64)


def _payload(field: bytes) -> np.ndarray[Any, Any]:
    """What comes after a single field's tag and length, each a varint."""
    octets = np.frombuffer(field, np.uint8)
    begin = 0
    for _ in range(2):
        while begin < len(field) and field[begin] >= 0x80:
            begin += 1
        begin += 1
    return octets[begin:]


def _varints(octets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Seven bits an octet, the lowest first; an octet below 128 is the last of its number."""
    if int(octets.max(initial=0)) < 0x80:
        return octets.astype(np.uint64)
    last = octets < 0x80
    ends = np.flatnonzero(last)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    places = np.arange(len(octets)) - np.repeat(starts, lengths)
    bits = (octets & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(bits, starts)
