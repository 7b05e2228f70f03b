"""A consumer's knobs.  Pure."""

import re
import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from inspect import isasyncgenfunction, isgeneratorfunction
from typing import Any, Literal, TypedDict

from duemq.errors import InvalidArgument
from duemq.protocol import checks, limits
from duemq.protocol.balance import AVERAGE
from duemq.protocol.moments import MOMENT_MS_MAX, epoch_ms
from duemq.protocol.retry_policy import RETRIES_MAX
from duemq.settings import ClientSettings

StartFrom = str | datetime | int
"""An end of the queue, "earliest" or "latest"; or a time: the first message stored then or later.
An aware datetime, ms since the epoch, RFC 3339 text, or how long before the start: "-1h", "-90s".
"""

ENDS = ("earliest", "latest")

Order = Literal["queue", "key"]

START_FROM_LIMIT = (
    f"earliest, latest, an aware datetime, 0 to {MOMENT_MS_MAX} ms since the epoch, RFC 3339 text,"
    " or how long ago, as -1h"
)
MEMBER_NAME_CHARACTERS_MAX = 127
_MEMBER_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MEMBER_NAME_CHARACTERS_MAX - 1}}}")
THREADS_MAX = 1_024
# From the least to the most.
SESSION_TIMEOUT_S = (limits.SESSION_TIMEOUT_MS_MIN / 1000, limits.SESSION_TIMEOUT_MS_MAX / 1000)


@dataclass(frozen=True, slots=True)
class Window:
    """Flow control of one queue: nothing is pulled while one of these is reached."""

    messages: int = 1_000
    bytes: int = 100 * 1024 * 1024
    span: int = 2_000
    """Between the commit point and the next pull, in offsets: bounds what a crash repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """How a consumer behaves; the defaults fit most.

    Raises InvalidArgument for a value out of its range.
    """

    start_from: StartFrom = "latest"
    """Where a group begins in a queue that it has no offset for: "earliest", "latest", or a time
    (an aware datetime, ms since the epoch, RFC 3339 text, or "-1h").  Of a queue that comes
    later, "latest" leaves out nothing that was stored since the consumer started, or since the
    group began, as far as its coordinator knows that."""
    threads: int = 20
    """Callbacks at a time: threads, or tasks if the callback is a coroutine function."""
    batch_messages_max: int = 1_000
    """Longest list that a callback per batch gets."""
    processing_timeout_s: float = 900.0
    """A callback that runs for longer: its message, or batch, is sent back, and its result ignored.
    Not in ordered consumption."""
    queue_messages_max: int = 1_000
    """Of one queue, pulled and not finished: flow control, as the next two."""
    queue_bytes_max: int = 100 * 1024 * 1024
    """As above, in bytes."""
    queue_span_max: int = 2_000
    """From a queue's commit point to its next pull, in offsets: what a slow message holds up in the
    end, and the most that a crash repeats of a queue."""
    pull_bytes_max: int = 1024 * 1024
    """Of one pull answer."""
    pull_wait_s: float = 20.0
    """How long a broker may park a pull that finds nothing."""
    session_timeout_s: float = 10.0
    """A member that its coordinator did not hear of for so long loses its queues."""
    strategy: str = AVERAGE
    """How the group shares queues; all members name the same one."""
    commit_interval_s: float = 5.0
    """Between commits while consuming; also at each revoke and at close."""
    retry_wait_s_min: float = 0.2
    """Before the callback is called again with a failed message that its broker did not take back;
    doubles, with jitter, up to …"""
    retry_wait_s_max: float = 30.0
    """… this."""
    suspend_s: float = 1.0
    """In ordered consumption: how long a queue or key waits after a failure."""
    retries_in_order_max: int = 16
    """In ordered consumption and broadcast: calls after the first, before a message that keeps
    failing is a dead letter (broadcast: is skipped)."""
    offsets_dir: str = ""
    """Broadcast: where offsets are kept, in <group>/<member_name>.json; empty: ~/.duemq/offsets."""
    release_timeout_s: float = 5.0
    """A queue that goes to another member waits so long for running callbacks."""
    close_timeout_s: float = 10.0
    """`close` waits so long for running callbacks."""
    start_timeout_s: float = 30.0
    """`start` fails if the group could not be joined for so long."""
    client: ClientSettings = field(default_factory=ClientSettings)
    """How long to wait for a nameserver."""

    def __post_init__(self) -> None:
        check_start_from(self.start_from)
        checks.whole("threads", self.threads, 1, THREADS_MAX)
        checks.whole("batch_messages_max", self.batch_messages_max, 1, 1_000_000)
        checks.number("processing_timeout_s", self.processing_timeout_s, 0.01, 86_400)
        checks.whole("queue_messages_max", self.queue_messages_max, 1, limits.PULL_RECORDS_MAX)
        checks.whole("queue_bytes_max", self.queue_bytes_max, 1, 1 << 40)
        checks.whole("queue_span_max", self.queue_span_max, 1, 1 << 40)
        checks.whole("pull_bytes_max", self.pull_bytes_max, 1, limits.PULL_BYTES_MAX)
        checks.number("pull_wait_s", self.pull_wait_s, 0, limits.PULL_WAIT_MS_MAX / 1000)
        checks.number("session_timeout_s", self.session_timeout_s, *SESSION_TIMEOUT_S)
        checks.number("commit_interval_s", self.commit_interval_s, 0.01, 3_600)
        checks.number("retry_wait_s_min", self.retry_wait_s_min, 0.001, 3_600)
        checks.number("retry_wait_s_max", self.retry_wait_s_max, self.retry_wait_s_min, 86_400)
        checks.number("suspend_s", self.suspend_s, 0.001, 3_600)
        checks.whole("retries_in_order_max", self.retries_in_order_max, 0, RETRIES_MAX)
        checks.number("release_timeout_s", self.release_timeout_s, 0, 3_600)
        checks.number("close_timeout_s", self.close_timeout_s, 0, 3_600)
        checks.number("start_timeout_s", self.start_timeout_s, 0.1, 3_600)
        checks.instance("client", self.client, ClientSettings)
        for name in ("strategy", "offsets_dir"):
            if not isinstance(getattr(self, name), str):
                raise checks.wrong(name, getattr(self, name), "text")

    @property
    def window(self) -> Window:
        """The flow control of each queue."""
        return Window(self.queue_messages_max, self.queue_bytes_max, self.queue_span_max)

    def changed(
        self, *, start_from: StartFrom | None = None, threads: int | None = None
    ) -> "ConsumerSettings":
        """These settings, but for what is given."""
        given: dict[str, Any] = {"start_from": start_from, "threads": threads}
        return replace(self, **{name: value for name, value in given.items() if value is not None})


class PushOptions(TypedDict, total=False):
    """What both push consumers take by name, and the twin's, but for `batch`."""

    order: Order | None
    broadcast: bool
    member_name: str | None
    start_from: StartFrom | None
    threads: int | None
    settings: ConsumerSettings | None


def check_choices(
    *,
    group: object,
    callback: object,
    order: object,
    member_name: object,
    settings: object = None,
    **flags: object,
) -> None:
    """Raises InvalidArgument for what a push consumer cannot be."""
    check_group(group)
    for name, value in flags.items():
        checks.flag(name, value)
    if settings is not None:
        checks.instance("settings", settings, ConsumerSettings)
    if not callable(callback):
        raise checks.wrong("callback", callback, "a function of a message, or of a list of them")
    if isgeneratorfunction(callback) or isasyncgenfunction(callback):
        raise checks.wrong("callback", callback, "a function without `yield`: nothing would run")
    if order not in (None, "queue", "key"):
        raise checks.wrong("order", order, "queue or key")
    if member_name is None:
        return
    limit = f"1 to {MEMBER_NAME_CHARACTERS_MAX} of A-Z a-z 0-9 . _ -, not beginning with a dot"
    checks.matches("member_name", member_name, _MEMBER_NAME, limit)


def check_group(group: object) -> None:
    """Raises InvalidArgument for what names no group; brokers say which characters it may have."""
    checks.filled("group", group)


def check_start_from(start_from: object) -> None:
    """Raises InvalidArgument for what is no StartFrom."""
    if isinstance(start_from, str):
        if start_from == "now":  # "latest" is meant
            raise checks.wrong("start_from", start_from, START_FROM_LIMIT)
        try:
            resolved(start_from, time.time_ns() // 1_000_000)
        except InvalidArgument:
            raise checks.wrong("start_from", start_from, START_FROM_LIMIT) from None
    elif isinstance(start_from, datetime | int) and not isinstance(start_from, bool):
        start_ms(start_from)
    else:
        raise checks.wrong("start_from", start_from, START_FROM_LIMIT)


def resolved(start_from: StartFrom, now_ms: int) -> StartFrom:
    """With a time as text in ms: "-1h" counts back from `now_ms`.  Raises InvalidArgument."""
    if not isinstance(start_from, str) or start_from in ENDS:
        return start_from
    return epoch_ms(start_from, now_ms, "start_from")


def start_ms(start_from: datetime | int) -> int:
    """A time to start from, in ms since the epoch.  Raises InvalidArgument."""
    return epoch_ms(start_from, 0, "start_from")
