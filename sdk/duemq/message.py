"""A message as the application meets it: `Message` received, `Outgoing` to send.  Pure.

A pull's records are parsed by protobuf in one go; a `Message` is a view of one of them: its
attributes are read when they are asked for.  Keeping a message keeps the memory of the pull that
brought it (up to a few MiB): copy what you store for long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from duemq.protocol.moments import Moment
from duemq.protocol.names import SYSTEM_SIGN
from duemq.protocol.retry_policy import Delay
from duemq.v1.message_pb2 import Record, RecordBatch

if TYPE_CHECKING:
    from duemq.v1.view_pb2 import QueueRecordsView

__all__ = ["Message", "Origin", "Outgoing", "Retry", "SendOptions", "messages_of"]


class Origin(NamedTuple):
    """Where messages were pulled from."""

    topic: str
    broker: str
    queue: int

    @property
    def untraced(self) -> bool:
        """None of the messages carries a trace."""
        return False


class Untraced(Origin):
    """The same, of messages none of which carries a trace."""

    __slots__ = ()

    @property
    def untraced(self) -> bool:
        """None of them does."""
        return True


class _Traced(Origin):
    """The same, of messages of one pull some of which carry a trace."""

    carried: Mapping[int, str] | None = None
    """`traceparent`s by offset, once somebody looked."""


class Retry(NamedTuple):
    """The story of a message that its group sent back: `Message.retry`."""

    origin_topic: str
    """Where it lay first, as the next three."""
    origin_broker: str
    origin_queue: int
    origin_offset: int
    first_failed_ms: int
    """By the broker's clock, ms since the epoch."""
    last_failed_ms: int
    """As above."""
    error: str
    """Why it failed the last time."""
    group: str = ""
    """That sent it back."""


class Message:
    """A message received.  Equal to another of the same queue and offset."""

    __slots__ = ("_origin", "_record", "offset", "store_ms")

    offset: int
    """Its place in the queue."""
    store_ms: int
    """When the broker stored it in this queue, ms since the epoch; not before it was due."""

    def __init__(self, record: Record, origin: Origin, offset: int, store_ms: int) -> None:
        """Made by consumers; tests of applications may make their own."""
        self._record = record
        self._origin = origin
        self.offset = offset
        self.store_ms = store_ms

    @property
    def topic(self) -> str:
        """The topic that it was sent to."""
        topic = self._origin.topic
        if topic.startswith(SYSTEM_SIGN) and self._record.HasField("retry"):
            return self._record.retry.origin.topic
        return topic

    @property
    def stored_topic(self) -> str:
        """The topic that it was received from: `topic`, or %RETRY%<group> for a retry."""
        return self._origin.topic

    @property
    def broker(self) -> str:
        """The broker that it was received from."""
        return self._origin.broker

    @property
    def queue(self) -> int:
        """The number of its queue on that broker, of `stored_topic`; so is `offset`."""
        return self._origin.queue

    @property
    def body(self) -> bytes:
        """What the producer sent."""
        return self._record.body

    @property
    def message_id(self) -> str:
        """Unique; chosen by the producer."""
        return self._record.message_id

    @property
    def key(self) -> str | None:
        """For look-up."""
        return self._record.key or None

    @property
    def tag(self) -> str | None:
        """For filtering."""
        return self._record.tag or None

    @property
    def ordering_key(self) -> str | None:
        """Messages of one ordering key are in one queue, in the order they were sent."""
        return self._record.ordering_key or None

    @property
    def timer_key(self) -> str | None:
        """The name under which it waited for its time."""
        return self._record.timer_key or None

    @property
    def properties(self) -> Mapping[str, str]:
        """The application's own, and `traceparent` where the producer traced."""
        return dict(self._record.properties)

    @property
    def may_be_traced(self) -> bool:
        """False: it is known to carry no sampled `traceparent`."""
        return not self._origin.untraced

    def came_with(self, other: Message) -> bool:
        """Both were brought by one pull."""
        return self._origin is other._origin

    def lay_with(self, other: Message) -> bool:
        """Both were in one queue."""
        return self._origin == other._origin

    @property
    def born_ms(self) -> int:
        """When the producer made it, by the producer's clock."""
        return self._record.born_ms

    @property
    def due_ms(self) -> int | None:
        """When it was due; None if it was not delayed."""
        return self._record.due_ms or None

    @property
    def attempt(self) -> int:
        """Deliveries to the group, this one included: 1 the first time."""
        return self._record.attempt + 1

    @property
    def deliveries(self) -> int:
        """How often the group had been given it before; of a dead letter, in all."""
        return self._record.attempt

    @property
    def retry(self) -> Retry | None:
        """Where it came from and why it failed; None unless the group sent it back."""
        if not self._record.HasField("retry"):
            return None
        story = self._record.retry
        origin = story.origin
        return Retry(
            origin.topic,
            origin.broker,
            origin.queue_id,
            story.origin_offset,
            story.first_failed_ms,
            story.last_failed_ms,
            story.error,
            story.group,
        )

    def again(self) -> None:
        """Counts an attempt that failed, before the message is given to the callback once more.

        For consumers; what lies in the queue does not change.
        """
        self._record.attempt += 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self.offset == other.offset and self._origin == other._origin

    def __hash__(self) -> int:
        return hash((self._origin, self.offset))

    def __repr__(self) -> str:
        topic, broker, queue = self._origin
        return (
            f"<Message {self.message_id} {topic} {broker}/{queue}@{self.offset} "
            f"{len(self.body)} bytes>"
        )


def messages_of(pulled: QueueRecordsView, broker: str) -> list[Message]:
    """The messages of one queue of a pull's answer, in queue order."""
    kind = Untraced if pulled.untraced else _Traced
    origin = kind(pulled.topic, broker, pulled.queue_id)
    records = RecordBatch.FromString(pulled.records).records
    starts, counts, store_ms = pulled.run_offsets, pulled.run_counts, pulled.run_store_ms
    offsets: Iterator[int]
    times: Iterator[int]
    if len(counts) == 1:
        offsets = iter(range(starts[0], starts[0] + counts[0]))
        times = repeat(store_ms[0], counts[0])
    else:
        offsets = chain.from_iterable(
            range(start, start + count) for start, count in zip(starts, counts, strict=True)
        )
        times = chain.from_iterable(map(repeat, store_ms, counts))
    return list(map(Message, records, repeat(origin), offsets, times))


def traceparents(messages: Sequence[Message]) -> dict[int, str]:
    """The property of those that have one, by place."""
    origin = messages[0]._origin
    known = origin.carried if isinstance(origin, _Traced) else None
    if known is not None and origin is messages[-1]._origin:
        return {
            index: known[message.offset]
            for index, message in enumerate(messages)
            if message.offset in known
        }
    return {
        index: properties["traceparent"]
        for index, message in enumerate(messages)
        if "traceparent" in (properties := message._record.properties)
    }


def note_traceparents(messages: Sequence[Message]) -> list[str]:
    """The same, of all messages of a pull, which are not searched again."""
    found, origin = traceparents(messages), messages[0]._origin
    if isinstance(origin, _Traced):
        origin.carried = {messages[index].offset: text for index, text in found.items()}
    return list(found.values())


def records_of(messages: Sequence[Message]) -> list[Record]:
    """What they are views of: quicker where many are asked for the same."""
    return [message._record for message in messages]


class SendOptions(TypedDict, total=False):
    """What may be said of a message that is sent, by name: `send`, `submit`, `send_many`."""

    key: str | None
    """For look-up."""
    tag: str | None
    """For filtering."""
    ordering_key: str | None
    """Messages of one ordering key go to one queue, in the order sent."""
    properties: Mapping[str, str] | None
    """Text by name."""
    delay: Delay | None
    """From the broker's clock.  At most one of this and the next two."""
    deliver_at: Moment | None
    """An aware datetime, epoch milliseconds or RFC 3339 text."""
    delay_level: int | None
    """1 to the number of the broker's levels."""
    timer_key: str | None
    """Names a delayed message, for its topic: what waits under the key is replaced."""
    if_absent: bool
    """Raises TimerExists instead, if something waits under the key."""


@dataclass(slots=True)
class Outgoing:
    """A message for `send_many`: a body and its SendOptions."""

    body: bytes
    _: KW_ONLY
    key: str | None = None
    tag: str | None = None
    ordering_key: str | None = None
    properties: Mapping[str, str] | None = None
    delay: Delay | None = None
    deliver_at: Moment | None = None
    delay_level: int | None = None
    timer_key: str | None = None
    if_absent: bool = False
