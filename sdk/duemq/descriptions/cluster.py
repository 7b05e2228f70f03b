"""What runs, and what became of what ran; the delayed messages that timer shards keep."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NameserverDescription:
    """A nameserver of this client's list."""

    address: str
    error: str | None
    """Why it did not answer."""


@dataclass(frozen=True, slots=True)
class ForgottenTopic:
    """What a broker that was given up had of a topic."""

    topic: str
    queues: int
    elsewhere: bool
    """Other brokers serve the topic, too: what they store of it is there."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A broker or timer service that was given up, or would be, as it was last."""

    name: str
    timer: bool
    """It was a timer service."""
    address: str
    lost_ms: int
    """Since when it is lost; epoch ms, by a nameserver's clock."""
    stopped: bool
    """It said goodbye.  False: it fell silent."""
    topics: tuple[ForgottenTopic, ...] | None
    """What it served; None: no nameserver remembers."""
    missing: tuple[NameserverDescription, ...] = ()
    """Nameservers that did not answer."""


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """A replica of a broker or timer shard, as the one that leads told the nameservers last."""

    name: str
    """In its group."""
    role: str
    """`leader`, `follower`, `learner` (it catches up) or `away`."""
    in_sync: bool
    """What is acknowledged is on its disk."""
    epoch: int
    """Grows with each change of the leader."""
    lag_bytes: int = 0
    """How much of the log it lacks."""
    lag_s: float = 0.0
    """For how long it has lacked some."""
    address: str = ""
    """HOST:PORT for operators; empty: not known."""
    since_ms: int = 0
    """Since when it has this role, or is in sync or not; epoch ms."""
    reason: str = ""
    """Why it is not in sync."""


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """A broker that the nameservers list.  With `error`, all between it and `lost_ms` is 0."""

    name: str
    address: str
    error: str | None
    version: str = ""
    started_ms: int = 0
    store_id: int = 0
    read_only: bool = False
    log_start_position: int = 0
    log_durable_position: int = 0
    checkpoint_position: int = 0
    delay_levels_ms: tuple[int, ...] = ()
    lost_ms: int | None = None
    """Since when the nameservers have not heard of it; None: it is listed as live."""
    replicas: tuple[ReplicaDescription, ...] = ()
    """Sorted by name; of one that is lost, as they were last.  Empty: it has none."""


@dataclass(frozen=True, slots=True)
class StuckTimers:
    """Delayed messages of a topic that are due, and kept, because nobody can store them now."""

    topic: str
    timers: int
    reason: str


@dataclass(frozen=True, slots=True)
class TimerOwner:
    """A queue of %TIMER% at a broker, and the timer service that owns it."""

    broker: str
    queue_id: int | None
    """None: the service owns no queue there any more, and may hold what it took over before."""
    id: int
    """Names the service's data directory; 0: nobody has claimed the queue yet."""
    name: str
    shard: int
    shards: int
    since_ms: int | None = None
    last_seen_ms: int | None = None
    """None: not since the broker started."""
    released: bool = False
    """The next one that claims it gets it."""
    refused: str = ""
    """The service that was refused last, if any was since the broker started."""
    taken_over: int = 0
    """Delayed messages that the owner has taken over; only it knows which are still pending."""
    waiting: int = 0
    """Delayed messages that it has not."""


@dataclass(frozen=True, slots=True)
class TimerStats:
    """A timer shard.  With `error`, counts are 0.

    accepted = pending + fired + cancelled + replaced + dropped + lost.

    One that is missing has no address.
    """

    name: str
    address: str
    shard: int
    shards: int
    error: str | None
    accepted: int = 0
    pending: int = 0
    fired: int = 0
    cancelled: int = 0
    in_flight: int = 0
    """Fired and not yet acknowledged by a broker."""
    near: int = 0
    """Pending ones in memory."""
    next_due_ms: int | None = None
    lateness_p50_ms: float = 0.0
    """Of the last minute's fires, until they were durable; without those due when accepted."""
    lateness_p99_ms: float = 0.0
    lateness_max_ms: float = 0.0
    problems: tuple[str, ...] = ()
    """What is wrong with it, a sentence each."""
    stuck: tuple[StuckTimers, ...] = ()
    lost: int = 0
    """Damaged on the disk, and set aside by an operator."""
    replicas: tuple[ReplicaDescription, ...] = ()
    """As a broker's; of what `cluster` answers."""
    replaced: int = 0
    """Under their timer keys, or rescheduled: another one came for each."""
    dropped: int = 0
    """Kept back by a hold, and left out when it ended."""


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """Everything that runs."""

    nameservers: tuple[NameserverDescription, ...]
    brokers: tuple[BrokerDescription, ...]
    timers: tuple[TimerStats, ...]


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
