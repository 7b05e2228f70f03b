"""The record of a group: who leads, who is in sync.  Immutable; pure.

It lies in a store that changes it by compare-and-set alone (stores/).  Every change is a function
here, of the record that was read: a stale one fails at the store.

Encoded as JSON, keys sorted, at most RECORD_BYTES_MAX:

key            value
format         1
group          the group's name: a broker's, or a timer shard's
store_id       names the history that all its logs hold
revision       grows with each change, so that no two are the same bytes
epoch          of the last takeover; 0 while the group is being founded
leader         [name, disk id], or null
address        where the leader is reached
in_sync        [[name, disk id], …]
members        [name, …]: who may take part
registered_ms  of the last takeover, Unix; grows with each
log_version    the newest log format that every member reads
formers        [store_id, …] that decisions which accepted a loss have replaced; only if there are
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from duemq_server.storage.errors import UnknownVersion

FORMAT = 1
RECORD_BYTES_MAX = 2048
MEMBERS_MAX = 7
FORMERS_MAX = 8
"""Such decisions that a replica may have missed; after more it needs an empty directory."""
LOG_VERSION = 1
"""The newest that this release reads."""
LEAP_MIN = 1 << 31
"""More takeovers than a log can have missed: an operator's decision goes beyond their epochs."""


class Refused(Exception):
    """A rule forbids it; the message says which, and what an operator can do."""


class ReplicaId(NamedTuple):
    """A replica is a disk.

    Rule 5: the disk id is random and lies in the data directory.  An emptied directory, or a start
    that had to cut what was durable, makes a new one, which is in no set: it never counts for what
    its predecessor promised.
    """

    name: str
    disk: str

    def __str__(self) -> str:
        return f"{self.name}/{self.disk}"


@dataclass(frozen=True, slots=True)
class Record:
    """See the module."""

    group: str
    store_id: int
    members: frozenset[str]
    in_sync: frozenset[ReplicaId]
    epoch: int = 0
    leader: ReplicaId | None = None
    address: str = ""
    registered_ms: int = 0
    log_version: int = LOG_VERSION
    revision: int = 1
    formers: tuple[int, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Members that are not in sync."""
        return sorted(self.members - {each.name for each in self.in_sync})


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """What a store held at one moment."""

    version: str
    """Never the same for two writes, also after the record was removed."""
    record: Record
    lease: str | None = None
    """Changes with each renewal of the leader's lease; None: it has ended, by the store's word."""
    dead: bool = False
    """The leader's process has ended, by the word of its machine's kernel: it answers nobody."""


def encode(record: Record) -> bytes:
    """Raises ValueError for a record that is too large."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "group": record.group,
        "store_id": record.store_id,
        "revision": record.revision,
        "epoch": record.epoch,
        "leader": record.leader,
        "address": record.address,
        "in_sync": sorted(record.in_sync),
        "members": sorted(record.members),
        "registered_ms": record.registered_ms,
        "log_version": record.log_version,
    }
    if record.formers:
        fields["formers"] = record.formers
    data = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    if len(data) > RECORD_BYTES_MAX:
        raise ValueError(f"a record of {len(data)} bytes exceeds {RECORD_BYTES_MAX}")
    return data


def decode(data: bytes) -> Record:
    """Raises ValueError, UnknownVersion."""
    try:
        fields = json.loads(data)
        if fields["format"] != FORMAT:
            raise UnknownVersion(f"a record of format {fields['format']}, not {FORMAT}")
        leader = fields["leader"]
        return Record(
            group=str(fields["group"]),
            store_id=int(fields["store_id"]),
            members=frozenset(map(str, fields["members"])),
            in_sync=frozenset(ReplicaId(*each) for each in fields["in_sync"]),
            epoch=int(fields["epoch"]),
            leader=ReplicaId(*leader) if leader else None,
            address=str(fields["address"]),
            registered_ms=int(fields["registered_ms"]),
            log_version=int(fields["log_version"]),
            revision=int(fields["revision"]),
            formers=tuple(map(int, fields.get("formers", ()))),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record of a group: {error!r}") from error


# -- founding ---------------------------------------------------------------


def announced(
    record: Record | None,
    *,
    group: str,
    members: frozenset[str],
    me: ReplicaId,
    store_id: int,
    log_end: int,
) -> Record | None:
    """The record in which an empty replica is present; None if nothing is to be changed.

    Rule 7: a group is founded when all its replicas are present with empty logs: each puts itself
    into a record of epoch 0, and nobody takes that over before all are in it.  If the record is
    gone and a log is not, an operator decides (`adopted`).  Raises Refused.
    """
    if me.name not in members:
        raise Refused(f"{me.name} is none of the group's members {sorted(members)}")
    if record is not None and (record.epoch or me in record.in_sync):
        return None
    if log_end:
        raise Refused(
            f"the record of {group} is gone, and the log of {me} holds {log_end} bytes:"
            " see which replica has the most, then `duemq replica adopt` it"
        )
    if record is None:
        return Record(group, store_id, members, frozenset({me}))
    others = frozenset(each for each in record.in_sync if each.name != me.name)
    return replace(record, in_sync=others | {me}, revision=record.revision + 1)


def adopted(
    record: Record | None,
    *,
    group: str,
    members: frozenset[str],
    me: ReplicaId,
    store_id: int,
    last_epoch: int,
    leap: int = 0,
    formers: Iterable[int] = (),
) -> Record:
    """An operator says that this log is the group's: rule 7.  It takes over as ever then.

    Where others may have more, it is to be `renamed`.  `leap`: see `elected`; 0 for a log that
    nobody has led.  `formers`: those that are known beside the record, which may be older, and of
    an id that a loss has replaced since.
    """
    known = record.epoch if record is not None else 0
    told = (*record.formers, record.store_id) if record is not None else ()
    return Record(
        group,
        store_id,
        members,
        frozenset({me}),
        epoch=max(known, last_epoch, 1) + leap,
        registered_ms=record.registered_ms if record is not None else 0,
        revision=(record.revision if record is not None else 0) + 1,
        formers=with_formers(formers, told, store_id),
    )


def with_formers(known: Iterable[int], told: Iterable[int], store_id: int) -> tuple[int, ...]:
    """All of these but the group's own, the latest FORMERS_MAX; in order, `known` in front."""
    formers = dict.fromkeys([*known, *told])
    formers.pop(store_id, None)
    return tuple(formers)[-FORMERS_MAX:]


# -- taking over ------------------------------------------------------------


def check_readable(record: Record) -> None:
    """Raises Refused for a group whose log is of a release that is newer than this one."""
    if record.log_version > LOG_VERSION:
        raise Refused(
            f"the log of {record.group} is of version {record.log_version}, and this release reads"
            f" up to {LOG_VERSION}: start the newer one here"
        )


def taken_over(
    record: Record, me: ReplicaId, *, address: str, last_epoch: int, min_insync: int, now_ms: int
) -> Record:
    """The record in which `me` leads.

    Rule 4: only a member of the in-sync set may take over, by compare-and-set on the record that
    it read: epoch + 1, itself, the old leader dropped if enough remain.  It stops following before
    it appends its EPOCH entry.  Every start as leader is a takeover, also after its own restart.
    Rule 7: nobody takes over a record whose epoch is lower than a log's.  Raises Refused.
    """
    check_readable(record)
    if me not in record.in_sync:
        raise Refused(f"{me} is not in sync: it would lose what was committed without it")
    if record.epoch < last_epoch:
        raise Refused(
            f"the record is of epoch {record.epoch}, the log of {last_epoch}: the store was set"
            " back; `duemq replica adopt` the replica that has the most"
        )
    if record.epoch == 0 and record.missing:
        raise Refused(f"being founded: waiting for {', '.join(record.missing)}")
    in_sync = record.in_sync
    old = record.leader
    if old is not None and old != me and len(in_sync - {old}) >= min_insync:
        in_sync -= {old}
    return replace(
        record,
        epoch=record.epoch + 1,
        leader=me,
        address=address,
        in_sync=in_sync,
        registered_ms=max(now_ms, record.registered_ms + 1),
        revision=record.revision + 1,
    )


def elected(record: Record, me: ReplicaId, store_id: int, last_epoch: int, leap: int) -> Record:
    """An operator accepts a loss: `me`, which need not be in sync, takes over as ever then.

    The group is `renamed`.  `leap`: what the epoch grows by, LEAP_MIN or more and another one at
    each decision.  A record that is gone or was set back does not tell which epochs others have
    led: one number for two leaders would pass for what both logs have in common.  Raises Refused.
    """
    check_readable(record)
    if me.name not in record.members:
        _check_room(record)
    elected = replace(
        record,
        epoch=max(record.epoch, last_epoch) + 1 + leap,
        leader=None,
        address="",
        members=record.members | {me.name},
        in_sync=frozenset({me}),
        revision=record.revision + 1,
    )
    return renamed(elected, store_id)


def renamed(record: Record, store_id: int) -> Record:
    """Rule 8: whatever accepts a loss makes a new store_id.

    No timer handle, fetch position or cached offset of the lost history meets the new one, and a
    replica that has some of it gives that up.  Raises Refused.
    """
    if store_id == record.store_id:
        raise Refused("what accepts a loss needs a new store_id")
    formers = (*record.formers, record.store_id)[-FORMERS_MAX:]
    return replace(record, store_id=store_id, formers=formers)


# -- by the leader ----------------------------------------------------------


def with_in_sync(record: Record, in_sync: frozenset[ReplicaId]) -> Record:
    """The same leader's record with another set.  Raises Refused."""
    if record.leader not in in_sync:
        raise Refused("a leader is in its set")
    return replace(record, in_sync=in_sync, revision=record.revision + 1)


class MemberChange(NamedTuple):
    """An operator's: who may take part."""

    name: str
    joins: bool
    """Else it leaves."""
    accepted: bool = False
    """Fewer than `min_insync` may be left."""

    def is_done(self, record: Record) -> bool:
        """Whether the record says so already."""
        return (self.name in record.members) == self.joins


def with_change(record: Record, change: MemberChange, min_insync: int) -> Record:
    """The same leader's record with one member more, or less.  Raises Refused."""
    if change.joins:
        return with_member(record, change.name)
    return without_member(record, change.name, 0 if change.accepted else min_insync)


def with_member(record: Record, name: str) -> Record:
    """`name` may take part from now on.  Raises Refused."""
    if name in record.members:
        raise Refused(f"{name} is a member of {record.group} already")
    _check_room(record)
    return replace(record, members=record.members | {name}, revision=record.revision + 1)


def _check_room(record: Record) -> None:
    if len(record.members) >= MEMBERS_MAX:
        names = ", ".join(sorted(record.members))
        raise Refused(f"{record.group} has {MEMBERS_MAX} members, and no more may be: {names}")


def without_member(record: Record, name: str, min_insync: int) -> Record:
    """`name` takes no part any more, and is not in sync.  Raises Refused."""
    if name not in record.members:
        names = ", ".join(sorted(record.members))
        raise Refused(f"{name} is no member of {record.group}: members are {names}")
    if record.leader is not None and record.leader.name == name:
        raise Refused(
            f"{name} leads {record.group}: let another one lead first (`duemq replica lead`)"
        )
    members = record.members - {name}
    in_sync = frozenset(each for each in record.in_sync if each.name != name)
    left = len(members) if in_sync == record.in_sync else len(in_sync)
    if left < min_insync:
        raise Refused(
            f"without {name}, at most {left} would be in sync: min_insync is {min_insync},"
            " and nothing would be accepted; --accept removes it all the same"
        )
    return replace(record, members=members, in_sync=in_sync, revision=record.revision + 1)
