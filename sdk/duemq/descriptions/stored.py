"""Topics, the messages in them, and how far groups are."""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from duemq.errors import MissingBroker
from duemq.protocol.retry_policy import RetryPolicy

if TYPE_CHECKING:
    from duemq.message import Message


@dataclass(frozen=True, slots=True)
class TopicSummary:
    """A topic and where it is served."""

    name: str
    queues: int
    """On all brokers together."""
    message_bytes_max: int
    """Of a message's body; where brokers differ, the least.  0: a broker's own limit."""
    brokers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueueRange:
    """A queue of a topic and the messages that it holds: from `min_offset` below `max_offset`."""

    broker: str
    queue: int
    min_offset: int
    max_offset: int
    last_store_ms: int | None
    """Of the newest message."""
    in_per_s: float = 0.0
    """Messages stored a second, over the last minute."""
    messages: int = 0
    """Kept now.  Fewer than the offsets, where a log has lost its end."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic, queue by queue."""

    name: str
    message_bytes_max: int
    queues: tuple[QueueRange, ...]
    missing: tuple[MissingBroker, ...] = ()
    """Brokers whose queues are not in here because they did not answer."""

    @property
    def messages(self) -> int:
        """Kept now."""
        return sum(queue.messages for queue in self.queues)

    @property
    def in_per_s(self) -> float:
        """Messages stored a second, over the last minute."""
        return sum(queue.in_per_s for queue in self.queues)

    @property
    def last_store_ms(self) -> int | None:
        """Of the newest message of all."""
        return max((queue.last_store_ms or 0 for queue in self.queues), default=0) or None


@dataclass(frozen=True, slots=True)
class PurgedQueue:
    """A queue whose messages below `offset` were taken away, or would be."""

    topic: str
    broker: str
    queue: int
    offset: int
    messages: int
    """How many."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A consumer group."""

    name: str
    members: int
    generation: int
    coordinator: str | None
    """The broker that shares its queues out; None: nobody now."""
    lag: int | None = None
    """Messages not consumed yet, of all queues with an offset; None: not asked for, or denied."""
    lag_ms: int | None = None
    """How long the oldest of them has been stored."""


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member of a group."""

    member_id: str
    client: str
    topics: dict[str, str]
    """Subscriptions: topic → filter."""
    queues: tuple[tuple[str, str, int], ...]
    """Assigned: (topic, broker, queue)."""
    last_heartbeat_ms: int
    session_timeout_ms: int
    incarnation: int = 0
    """Of a static member; 0: not static."""
    leaving: bool = False
    """It closes: it gets no queues, and keeps those whose callbacks still run."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a group is in a queue."""

    topic: str
    broker: str
    queue: int
    member_id: str | None
    """Who has the queue now."""
    offset: int | None
    """The next message to consume; None: nothing committed yet."""
    min_offset: int
    max_offset: int
    generation: int = 0
    """The newest that took the queue over; 0: none."""
    lag_ms: int = 0
    """How long the oldest message that is not consumed has been stored; 0: there is none; -1: the
    broker cannot read it."""
    in_flight: int = 0
    """Handed to a member, neither committed nor sent back; since the broker started."""
    settled: int = 0
    """Past the offset, sent back."""
    consumed_per_s: float = 0.0
    """Offsets passed a second, over the last minute."""
    last_commit_ms: int | None = None
    """None: not since the broker started."""
    lag: int | None = None
    """Messages kept that are not consumed yet; None: nothing committed yet."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A consumer group, its members and its progress."""

    name: str
    coordinator: str | None
    generation: int
    strategy: str
    members: tuple[MemberDescription, ...]
    progress: tuple[Progress, ...]
    retry: RetryPolicy | None = None
    """As it was put, or else the brokers' own; where they differ, that of the first."""
    without_settings: tuple[str, ...] = ()
    """Brokers that lack what others were put, say because they are new: `put_group` again."""
    sent_back: int = 0
    """Messages given back for another delivery, since the brokers started; as the next."""
    dead_letters: int = 0
    """Messages given up."""
    dead_letters_kept: int = 0
    """In %DLQ%<group> now."""
    retries_waiting: int = 0
    """Given back and not due yet."""
    waits_until_ms: int | None = None
    """Until then at most queues wait for members of before, which may still have them."""
    missing: tuple[MissingBroker, ...] = ()
    """Brokers whose part is not in here because they did not answer."""

    @property
    def lag(self) -> int:
        """Of all queues with a committed offset."""
        return sum(queue.lag or 0 for queue in self.progress)

    @property
    def lag_ms(self) -> int:
        """How long the oldest message that is not consumed has been stored; 0: there is none.

        Of the queues that can be read; -1: of none.
        """
        return max((queue.lag_ms for queue in self.progress), default=0)

    @property
    def in_flight(self) -> int:
        """Handed to members, neither committed nor sent back."""
        return sum(queue.in_flight for queue in self.progress)

    @property
    def consumed_per_s(self) -> float:
        """Messages consumed a second, over the last minute."""
        return sum(queue.consumed_per_s for queue in self.progress)


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """A group's offset in a queue, before and after it was moved."""

    topic: str
    broker: str
    queue: int
    before: int | None
    """None: the group had none."""
    after: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class FoundMessages:
    """What a look-up found, by store time."""

    messages: tuple["Message", ...]
    more: bool
    """There are others: the look-up ended at its limit."""
    missing: tuple[MissingBroker, ...]
    """Brokers that did not answer, or not to the end: they may have others."""


class DeliveryState(enum.Enum):
    """What a group has made of a message, as far as its broker knows."""

    WAITING = "waiting"
    """Not handed out since the broker started."""
    IN_FLIGHT = "in-flight"
    """Handed out, not committed."""
    CONSUMED = "consumed"
    """The group has passed it."""
    SENT_BACK = "sent-back"
    """To be retried, or a dead letter: see the copies."""


@dataclass(frozen=True, slots=True)
class GroupDelivery:
    """A group that reads the queue of a message."""

    group: str
    state: DeliveryState
    offset: int
    """The group's next one in that queue."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in its topic, and what each group has made of it."""

    message: "Message"
    groups: tuple[GroupDelivery, ...]


@dataclass(frozen=True, slots=True)
class MessageTrace:
    """The life of a message, as the brokers know it.

    A delayed message is in `accepted` from when it was sent, and in `stored` from when it was due.
    One that is in `accepted` only is pending or was cancelled: brokers do not know which.
    """

    message_id: str
    stored: tuple[StoredMessage, ...]
    """More than one only if its producer sent it more than once."""
    copies: tuple["Message", ...]
    """In %RETRY% and %DLQ% topics, by store time; `Message.retry` tells of the failures."""
    accepted: tuple["Message", ...]
    """In %TIMER%, for a later time."""
    missing: tuple[MissingBroker, ...]
    """Brokers that did not answer, or not to the end: they may know more."""
    waiting: tuple["Message", ...] = ()
    """Sent back, in %TIMER% until its retry is due: it is not in %RETRY% yet."""

    @property
    def found(self) -> bool:
        """Whether anything is known of it."""
        return bool(self.stored or self.copies or self.accepted or self.waiting)
