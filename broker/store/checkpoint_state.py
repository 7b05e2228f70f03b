"""The checkpoint: what the broker knew at one position of its log.  Pure.

With it a start reads only the log beyond that position.  Everything in it can be made again from a
whole log; without it a start reads all of that.  Payload of the file `checkpoint`
(storage/checkpoint.py), little-endian:

off  size  field
 0    4    json_length
 4    n    JSON: version, position, verify_from, store_ms, topics, offsets,
           queues {topic: [next offset of each queue]}; from version 2 on settled (offsets.py),
           groups (group_configs.py), retries {group: how many it ever sent back to be retried};
           from version 3 on timer_owners (timer_owners.py); version 4, of a log with
           replicas, has epochs [[epoch, where its EPOCH entry lies], ...] and, where groups are
           coordinated, memberships {group: what an entry of kind MEMBERSHIP says of it};
           version 5, of a replica that has not led since an entry was set aside, has set_aside
           [[position, bytes], ...]
4+n   …    producers' lanes (producers.py)
"""

import json
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from duemq_server.storage.errors import UnknownVersion

VERSION = 3
EPOCHS_VERSION = 4
"""Written only where there are epochs: a log that has no replicas needs no newer release."""
SET_ASIDE_VERSION = 5
# Version 1 lacks what send-backs need, version 2 the owners of timer queues.
_READABLE = (1, 2, VERSION, EPOCHS_VERSION, SET_ASIDE_VERSION)
ROWS_AT_ONCE = 100
_HEAD = struct.Struct("<I")
_dumps = json.JSONEncoder(separators=(",", ":")).encode


class CheckpointState(NamedTuple):
    """`position`: where the state was taken; `verify_from`: where a start begins to verify."""

    position: int
    verify_from: int
    store_ms: int
    topics: dict[str, Any]
    offsets: list[Any]
    queues: dict[str, list[int]]
    lanes: bytes
    settled: list[Any]
    groups: list[dict[str, Any]]
    retries: dict[str, int]
    timer_owners: dict[str, Any]
    epochs: tuple[tuple[int, int], ...] = ()
    memberships: Mapping[str, str] = MappingProxyType({})
    set_aside: tuple[tuple[int, int], ...] = ()


def encode(state: CheckpointState) -> list[bytes]:
    """The checkpoint's payload, in parts: together they may be large."""
    fields = state._asdict()
    del fields["lanes"]
    version = EPOCHS_VERSION if state.epochs or state.memberships else VERSION
    if state.set_aside:
        version = SET_ASIDE_VERSION
    for name in ("epochs", "memberships", "set_aside"):
        if not fields[name]:
            del fields[name]
    text = "".join(_json({"version": version, **fields})).encode()
    return [_HEAD.pack(len(text)), text, state.lanes]


def _json(value: Any) -> Iterator[str]:
    """In pieces: `json` lets no other thread run while it makes one."""
    if isinstance(value, list) and len(value) > ROWS_AT_ONCE:
        for start in range(0, len(value), ROWS_AT_ONCE):
            yield "," if start else "["
            yield _dumps(value[start : start + ROWS_AT_ONCE])[1:-1]
        yield "]"
    elif isinstance(value, dict) and value:
        separator = "{"
        for name, each in value.items():
            yield f"{separator}{_dumps(name)}:"
            yield from _json(each)
            separator = ","
        yield "}"
    else:
        yield _dumps(value)


def decode(payload: bytes, path: str = "checkpoint") -> CheckpointState:
    """Raises UnknownVersion, which names `path`."""
    (length,) = _HEAD.unpack_from(payload)
    fields = json.loads(payload[_HEAD.size : _HEAD.size + length])
    version = fields.pop("version")
    if version not in _READABLE:
        newest = _READABLE[-1]
        raise UnknownVersion(f"{path} has version {version}, this release reads 1 to {newest}")
    if version == 1:
        fields |= {"settled": [], "groups": [], "retries": {}}
    if version < 3:
        fields |= {"timer_owners": {}}
    for name in ("epochs", "set_aside"):
        fields[name] = tuple((first, second) for first, second in fields.get(name, ()))
    return CheckpointState(**fields, lanes=payload[_HEAD.size + length :])
