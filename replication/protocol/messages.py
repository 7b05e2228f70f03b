"""What replicas tell each other on a follower's stream.  Plain values; positions are bytes.

    follower                         leader
      Hello                  ──►
                             ◄──     Welcome, or NeedsSnapshot, or Refusal
                             ◄──     Chunk, Chunk, … (one without data is a heartbeat)
      Answer, Answer, …      ──►

Every one carries the epoch and the sender's disk id, and is compared with what is known: whoever
can connect to a leader does not count by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from duemq_server.replication.protocol.record import ReplicaId

CHUNK_BYTES_MAX = 1024 * 1024
"""Bytes of a chunk, but for one entry that is larger."""
COMMON_BYTES = 1024 * 1024
"""Of what both logs have in common, the last that are compared."""
UNANSWERED_BYTES_MAX = 8 * 1024 * 1024
"""Bytes on their way to a follower that it has not called durable."""

ANOTHER_LEADER = "let another replica lead (`duemq replica lead`), whose log is its own"
"""What helps who follows where a leader's log is damaged."""


class Reason(Enum):
    """Why a leader does not let somebody follow."""

    NOT_LEADING = auto()
    """Nor will this epoch be led: read the record again."""
    STALE = auto()
    """The follower's record is older than the leader's."""
    FOREIGN = auto()
    """Another group, or another history of it (`store_id`)."""
    STRANGER = auto()
    """The name is none of the record's members, or its release does not read the group's log."""
    LOST = auto()
    """It is in sync and has not what was committed: its disk must come back as a new one."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who wants to follow, and what its log holds."""

    group: str
    store_id: int
    replica: ReplicaId
    epoch: int
    """Of the record that it follows."""
    epochs: tuple[tuple[int, int], ...]
    start: int
    end: int
    log_version: int
    """The newest that it reads."""
    address: str = ""
    """Where its process is reached: a disk has one."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """Bytes of the leader's log."""

    start: int
    end: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The follower's log goes on at `truncate_to`."""

    epoch: int
    leader: ReplicaId
    truncate_to: int
    common: LogPart | None = None
    """What lies before that, for the follower to compare; None: nothing does, it is damaged at the
    leader, or the leader is of an older release."""


@dataclass(frozen=True, slots=True)
class NeedsSnapshot:
    """The leader's log begins beyond what the follower has: it needs a snapshot first."""

    epoch: int
    leader: ReplicaId
    log_start: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The follower cannot follow."""

    epoch: int
    leader: ReplicaId
    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole entries from `position` on; none: a heartbeat."""

    epoch: int
    leader: ReplicaId
    position: int
    data: bytes | memoryview
    committed: int
    """The leader's high watermark."""
    log_start: int
    sent_ms: int
    """The leader's steady clock; comes back in an Answer."""
    take_over: bool = False
    """The leader hands over: the follower shall lead."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The follower has everything before `durable` behind an fdatasync."""

    epoch: int
    replica: ReplicaId
    durable: int
    heard_ms: int
    """`sent_ms` of the last chunk that it got."""
    short_of_space: bool = False
    """If it led, it would accept nothing."""
