"""Messages that wait for a time, and those that repeat."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TimerCount:
    """A topic's delayed messages.

    accepted = pending + fired + cancelled + replaced + dropped + lost.
    """

    topic: str
    """Empty: topics that are counted together."""
    pending: int = 0
    accepted: int = 0
    """By shards that an older release ran: without what had left by then."""
    fired: int = 0
    """Delivered or on their way."""
    cancelled: int = 0
    replaced: int = 0
    """Under their key, or rescheduled."""
    lost: int = 0
    """Damaged on the disk, and set aside by an operator."""
    held: int = 0
    """Of the pending ones: fell due, and are kept back by a hold."""
    dropped: int = 0
    """Were kept back, and left out when that ended."""


@dataclass(frozen=True, slots=True)
class TimerHold:
    """Delayed messages that are kept back: of a topic, or only of keys of it."""

    topic: str
    key_prefix: str
    """Of their `timer_key`; empty: the whole topic."""
    since_ms: int
    resuming: bool = False
    """It ends as soon as some of its messages are dropped."""


class ResumePolicy(enum.StrEnum):
    """Which of those that fell due while they were held are sent."""

    ALL = "all"
    NEWEST = "newest"
    """Of those with the same `key` the one that was due last; all that have no key."""
    DROP_OLDER_THAN = "drop_older_than"
    """Those that were due no longer ago."""


@dataclass(frozen=True, slots=True)
class HeldTimers:
    """What a hold or its end is about."""

    pending: int | None
    """Delayed messages that are pending under it; None: more than can be counted in time."""
    was_held: bool
    """Before, at every shard."""
    dropped: int = 0
    """Of a resume: left out by its policy so far, since the shards started."""
    done: bool = True
    """Of a resume: none is left to be dropped, at any shard."""


@dataclass(frozen=True, slots=True)
class TimerBucket:
    """How many delayed messages are due at or after `from_ms` and before `to_ms`."""

    from_ms: int
    """Epoch milliseconds; 0: those that are overdue."""
    to_ms: int
    pending: int


class TimerState(enum.Enum):
    """What became of a delayed message."""

    PENDING = "pending"
    HELD = "held"
    """Pending: it fell due, and is kept back by a hold."""
    FIRED = "fired"
    """It is delivered or on its way."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """Its shard never had it, or it is gone for longer than `cancel_memory`."""


@dataclass(frozen=True, slots=True)
class TimerDescription:
    """A delayed message.  Of one that is not pending only handle, due time and state are known."""

    handle: str
    state: TimerState
    due_ms: int
    topic: str | None = None
    timer_key: str | None = None
    """The name that its owner gave it."""
    key: str | None = None
    tag: str | None = None
    message_id: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """None in a list, unless bodies were asked for."""


class DstPolicy(enum.StrEnum):
    """What becomes of a schedule's wall times as clocks are changed.

    A cron expression that names no hour follows the time that passes, whatever this is.
    """

    ONCE = "once"
    """What does not exist comes as the clocks go forward; what exists twice the first time."""
    SKIP = "skip"
    """What does not exist is left out; what exists twice comes the first time."""
    TWICE = "twice"
    """As ONCE; what exists twice comes both times."""
    SHIFT = "shift"
    """What does not exist comes as much later as the clocks go forward by; else as ONCE."""


class CatchUp(enum.StrEnum):
    """What becomes of a schedule's messages that could not be kept in time.

    Because the timer shard or the topic was away, the clock was set, or the schedule was paused.
    """

    ALL = "all"
    LATEST = "latest"
    """The last one of them."""
    NONE = "none"
    """None that is late by more than a minute."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A message that repeats."""

    name: str
    topic: str
    body: bytes
    key: str | None
    tag: str | None
    properties: dict[str, str]
    every_ms: int | None
    cron: str | None
    zone: str | None
    """Of cron."""
    dst: DstPolicy
    catch_up: CatchUp
    start_ms: int | None
    until_ms: int | None
    count: int | None
    jitter_ms: int
    paused: bool
    ended: bool
    """Nothing else will come."""
    stored: int
    """Messages since it was made or changed, those that wait among them."""
    next_due_ms: int | None
    """Of the first one that waits."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Once: when it is to be, and when it is due, with the jitter."""

    at_ms: int
    due_ms: int
