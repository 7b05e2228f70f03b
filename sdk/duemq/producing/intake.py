"""From a call's arguments to messages in the outbox.  Runs in callers' threads; does not wait."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from time import time_ns

from opentelemetry.trace import SpanContext

from duemq.errors import DuemqError, InvalidArgument, InvariantError, Overloaded, TooLarge
from duemq.message import Outgoing
from duemq.producing.batch import (
    NO_LABELS,
    RECORD_BYTES,
    Batch,
    Begun,
    Labels,
    may_begin,
)
from duemq.producing.batch_encoding import BLOCK_MESSAGES, Extras, extras_of
from duemq.producing.keyed.intake import KeyedIntake, check_keyed
from duemq.producing.outbox import BODY_BYTES_MAX, Outbox, Target, body_of, chunks_of
from duemq.protocol import checks
from duemq.protocol.due import Due, due_of
from duemq.protocol.moments import Moment
from duemq.protocol.retry_policy import Delay
from duemq.protocol.route import Queue
from duemq.protocol.timer_keys import check_keyed_topic
from duemq.tracing import sends, spans
from duemq.tracing.contexts import TRACEPARENT, baggage_to_carry
from duemq.tracing.sampling import NO_CONTEXT, current_context, runs_of

# The first bite taken from an iterable; later ones as many as fill a frame.
FIRST_CHUNK_MESSAGES = 512
# What comes one by one is looked at after so many: how long the next are, nobody knows.
LOOK_MESSAGES = 128
# A list may overshoot the frame by so much before it is cut one by one.
OVERSHOOT = 1.25
# Each ordering key has a batch of its own while the topic's queues are not known.
EARLY_BATCHES_MAX = 1_024

Piece = tuple[Batch, int, int]
"""Messages that a call put into a batch: (batch, first index, count)."""
Chunk = tuple[list[bytes | Outgoing], bool]
"""Messages of a `send_many`, and whether all are bodies that are not too long."""


class Intake:
    """One producer's."""

    def __init__(self, outbox: Outbox, keyed: KeyedIntake | None = None) -> None:
        """`keyed`: where messages with timer keys go."""
        self._outbox = outbox
        self._keyed = keyed

    def offer(
        self,
        target: Target,
        body: bytes,
        key: str | None,
        tag: str | None,
        ordering_key: str | None,
        properties: Mapping[str, str] | None,
        delay: Delay | None,
        deliver_at: Moment | None,
        delay_level: int | None,
        timer_key: str | None = None,
        if_absent: bool = False,
    ) -> tuple[Batch, int]:
        """Adds one message.

        Raises InvalidArgument, TooLarge, Overloaded, Closed; of one with a timer key Unavailable
        while no shard is known.
        """
        if timer_key is not None or if_absent:
            due = due_of(delay, deliver_at, delay_level)
            options = key, tag, ordering_key, properties, timer_key
            return self._offer_keyed(target, body, due, if_absent, *options)
        if type(body) is not bytes or len(body) > BODY_BYTES_MAX:
            body = body_of(body)
        outbox = self._outbox
        extras = due = parent = None
        labels = NO_LABELS
        queue: Queue | str | None = None
        if properties is not None or not (key is tag is ordering_key is None):
            labels = (key, tag, properties)
            extras = extras_of(key, tag, ordering_key, properties)
            if ordering_key:
                queue = _queue_of(target, ordering_key)
        if delay is not None or deliver_at is not None or delay_level is not None:
            due = due_of(delay, deliver_at, delay_level)
        if not target.growing:
            outbox.tracing = spans.enabled()  # once a frame
        inherits = outbox.tracing and target.traced
        if inherits and (properties or current_context() is not NO_CONTEXT):
            extras, parent = _inherited(extras, key, tag, ordering_key, properties)
        now_ms = time_ns() // 1_000_000
        return outbox.add(target, queue, body, extras, due, now_ms, labels, parent)

    def _offer_keyed(
        self,
        target: Target,
        body: bytes,
        due: Due | None,
        if_absent: bool,
        key: str | None,
        tag: str | None,
        ordering_key: str | None,
        properties: Mapping[str, str] | None,
        timer_key: str | None,
    ) -> tuple[Batch, int]:
        checks.flag("if_absent", if_absent)
        body, parent = body_of(body), None
        options = key, tag, ordering_key, properties, timer_key
        extras: Extras | None = extras_of(*options)
        queue = _queue_of(target, ordering_key) if ordering_key else None
        self._outbox.tracing = spans.enabled()
        if self._outbox.tracing and target.traced:
            extras, parent = _inherited(extras, *options)
        now_ms = time_ns() // 1_000_000
        check_keyed_topic(target.topic)
        due = check_keyed(timer_key, len(body), due, now_ms)
        if self._keyed is None or extras is None or timer_key is None:
            raise InvariantError("a timer key that nobody takes")
        given = target, queue, body, extras, due, now_ms, (key, tag, properties), parent, timer_key
        return self._keyed.add(*given, if_absent=if_absent)

    def chunks(self, messages: Iterable[bytes | Outgoing], common: Outgoing) -> Iterator[Chunk]:
        """Cuts an iterable to what roughly fills a frame each.

        `common`: the options of what is only a body.  Raises InvalidArgument, TooLarge before the
        first, for them and for a wrong message of a list or tuple.
        """
        if not isinstance(messages, Iterable) or isinstance(
            messages, bytes | bytearray | memoryview | str
        ):
            raise InvalidArgument(
                "send_many takes an iterable of messages, not one message",
                field="messages",
                value=type(messages).__name__,
                limit="an iterable of bytes or Outgoing",
            )
        _check_common(common)
        listed = isinstance(messages, list | tuple)
        all_bodies = listed and _check_all(messages)  # type: ignore[arg-type]
        rest = iter(messages)
        count = FIRST_CHUNK_MESSAGES
        while chunk := list(islice(rest, count)) if listed else self._bite(rest, count):
            yield chunk, all_bodies or _are_bodies(chunk)
            if isinstance(chunk[0], bytes):
                mean_bytes = len(chunk[0]) + RECORD_BYTES
                count = max(1, min(BLOCK_MESSAGES, self._outbox.frame_bytes // mean_bytes))

    def _bite(self, rest: Iterator[bytes | Outgoing], count: int) -> list[bytes | Outgoing]:
        """The next messages: `count`, or what roughly fills a frame."""
        bite: list[bytes | Outgoing] = []
        size = 0
        while len(bite) < count and size < self._outbox.frame_bytes:
            part = list(islice(rest, min(count - len(bite), LOOK_MESSAGES)))
            if not part:
                break
            bite += part
            size += RECORD_BYTES * len(part) + _bytes_of(part)
        return bite

    @contextmanager
    def pieces(self) -> Iterator[list[Piece]]:
        """Of a call.  If it fails, its error says what failed before; the rest is untold."""
        pieces: list[Piece] = []
        try:
            yield pieces
        except Exception as error:
            failed: list[DuemqError] = []
            for batch, first, count in pieces:
                if not batch.done:
                    batch.untell(first, count)
                if batch.done:  # since then, perhaps: twice is better than never
                    failed += filter(None, map(batch.error_of, range(first, first + count)))
            if failed:
                error.add_note(f"{len(failed)} messages before failed: {failed[-1]}")
            raise

    def offer_chunk(
        self, target: Target, chunk: Chunk, common: Outgoing, pieces: list[Piece]
    ) -> None:
        """Adds a chunk's messages to `pieces`, bodies with the options of `common`.

        The caller will be told of their outcome.  Raises InvalidArgument, TooLarge, naming the
        message by its number in the call; those in front of it are sent.
        """
        added: list[Piece] = []
        try:
            self._offer_all(target, chunk, common, added)
        except (InvalidArgument, TooLarge) as error:
            number = sum(count for _, _, count in pieces + added)
            raise _of_message(number, error, "those in front of it are sent") from None
        for batch, first, count in added:
            batch.tell(first, count)
        pieces += added

    def _offer_all(
        self, target: Target, chunk: Chunk, common: Outgoing, pieces: list[Piece]
    ) -> None:
        messages, bodies_only = chunk
        if bodies_only:
            self._offer_bodies(target, messages, common, pieces)  # type: ignore[arg-type]
            return
        for message in messages:
            if isinstance(message, Outgoing):
                own, body = message, message.body
            else:
                own, body = common, message
            batch, index = self.offer(
                target,
                body,
                own.key,
                own.tag,
                own.ordering_key,
                own.properties,
                own.delay,
                own.deliver_at,
                own.delay_level,
                own.timer_key,
                own.if_absent,
            )
            last = pieces[-1] if pieces else None
            if last is not None and last[0] is batch and last[1] + last[2] == index:
                pieces[-1] = (batch, last[1], last[2] + 1)
            else:
                pieces.append((batch, index, 1))

    def _offer_bodies(
        self, target: Target, bodies: list[bytes], common: Outgoing, pieces: list[Piece]
    ) -> None:
        extras, due = _extras_and_due(common)
        queue = target.queue_for(common.ordering_key) if common.ordering_key else None
        now_ms = time_ns() // 1_000_000
        traced = target.traced and spans.enabled()
        parent = sends.parent_of(common.properties) if traced else sends.UNSAMPLED
        labels = (common.key, common.tag, common.properties)
        if traced and current_context() is not NO_CONTEXT:
            extras = _with_baggage(
                extras, common.key, common.tag, common.ordering_key, common.properties
            )
        for part in self._parts(bodies, extras):
            begun = _begun(target.topic, part, extras, labels, parent)
            batch = self._outbox.add_list(target, queue, part, extras, due, now_ms, begun)
            pieces.append((batch, 0, len(part)))

    def _parts(self, bodies: list[bytes], extras: Extras | None) -> list[list[bytes]]:
        message_bytes = RECORD_BYTES + (len(extras.encoded) if extras is not None else 0)
        whole = sum(map(len, bodies)) + message_bytes * len(bodies)
        if whole <= self._outbox.frame_bytes * OVERSHOOT and len(bodies) <= BLOCK_MESSAGES:
            return [bodies]
        return chunks_of(bodies, message_bytes, self._outbox.frame_bytes)


def has_timer_keys(chunk: Chunk) -> bool:
    """Whether a message of a `send_many` has one."""
    messages, bodies_only = chunk
    return not bodies_only and any(
        isinstance(each, Outgoing) and each.timer_key is not None for each in messages
    )


def _extras_and_due(message: Outgoing) -> tuple[Extras | None, Due | None]:
    """Of a message's options.  Raises InvalidArgument, TooLarge."""
    labels = message.key, message.tag, message.ordering_key, message.properties
    extras = None if labels == (None,) * 4 else extras_of(*labels)
    return extras, due_of(message.delay, message.deliver_at, message.delay_level)


def _inherited(
    extras: Extras | None,
    key: str | None,
    tag: str | None,
    ordering_key: str | None,
    properties: Mapping[str, str] | None,
    timer_key: str | None = None,
) -> tuple[Extras | None, SpanContext | None]:
    """What the caller's context gives a message: baggage, if there is room for it, and a parent."""
    if current_context() is not NO_CONTEXT:
        extras = _with_baggage(extras, key, tag, ordering_key, properties, timer_key)
    elif not properties or TRACEPARENT not in properties:
        return extras, None
    return extras, sends.parent_of(properties)


def _with_baggage(
    extras: Extras | None,
    key: str | None,
    tag: str | None,
    ordering_key: str | None,
    properties: Mapping[str, str] | None,
    timer_key: str | None = None,
) -> Extras | None:
    """With the caller's baggage, if the message has none of its own and there is room for it."""
    carried = baggage_to_carry()
    if not carried:
        return extras
    try:
        properties = carried | dict(properties or {})
        return extras_of(key, tag, ordering_key, properties, timer_key)
    except TooLarge:
        return extras


def _check_common(common: Outgoing) -> None:
    """Of what has no options of its own.  Raises InvalidArgument, TooLarge."""
    _extras_and_due(common)
    if common.timer_key is not None or common.if_absent:
        raise checks.wrong(
            "timer_key", common.timer_key, "one for each message: send them as Outgoing"
        )


def _are_bodies(messages: Sequence[object]) -> bool:
    """All are bytes, and none is too long."""
    return set(map(type, messages)) == {bytes} and max(map(len, messages)) <= BODY_BYTES_MAX  # type: ignore[arg-type]


def _check_all(messages: Sequence[bytes | Outgoing]) -> bool:
    """Whether all are bodies.

    Raises InvalidArgument, TooLarge, naming the first message that is wrong by its number.
    """
    if not messages or _are_bodies(messages):
        return True
    for number, message in enumerate(messages):
        try:
            if isinstance(message, Outgoing):
                body = body_of(message.body)
                _, due = _extras_and_due(message)
                if message.timer_key is not None or message.if_absent:
                    check_keyed(message.timer_key, len(body), due, time_ns() // 1_000_000)
            else:
                body_of(message)
        except (InvalidArgument, TooLarge) as error:
            raise _of_message(number, error, "nothing was sent") from None
    return False


def _bytes_of(messages: Sequence[bytes | Outgoing]) -> int:
    """Of their bodies, about: what is none is refused later."""
    try:
        return sum(map(len, messages))  # type: ignore[arg-type]
    except TypeError:
        bodies = (each.body if isinstance(each, Outgoing) else each for each in messages)
        return sum(len(body) for body in bodies if isinstance(body, bytes | bytearray))


def _of_message(number: int, error: DuemqError, sent: str) -> DuemqError:
    return type(error)(
        f"message {number}: {error.message}; {sent}",
        field=f"messages[{number}].{error.field}",
        value=error.value,
        limit=error.limit,
    )


def _queue_of(target: Target, ordering_key: str) -> Queue | str:
    """Or the key, until the topic is found.  Raises Overloaded."""
    return target.queue_for(ordering_key) if target.found else _early_key(target, ordering_key)


def _early_key(target: Target, ordering_key: str) -> str:
    """The ordering key, if its messages may wait for the topic.  Raises Overloaded."""
    if len(target.growing) >= EARLY_BATCHES_MAX:
        raise Overloaded(
            f"topic {target.topic!r} is not found yet, and messages of {EARLY_BATCHES_MAX} "
            "ordering keys wait for it",
            field="ordering_key",
            value=ordering_key,
            limit=EARLY_BATCHES_MAX,
        )
    return ordering_key


def _begun(
    topic: str,
    bodies: Sequence[bytes],
    extras: Extras | None,
    labels: Labels,
    parent: SpanContext | None,
) -> list[Begun]:
    """The spans of those bodies that get one."""
    if not may_begin(extras, parent):
        return []
    key, tag, properties = labels
    count, head = len(bodies), spans.head
    if sends.may_be_light(properties, parent):
        runs = runs_of(count) if parent is not None else head.drawn_runs(count)
        return [_begun_run(run, bodies, key, tag, parent) for run in runs]
    indexes = range(count) if parent is not None else head.drawn(count)
    begun = ((at, sends.begin(topic, len(bodies[at]), *labels, parent)) for at in indexes)
    return [(at, *each) for at, each in begun if each is not None]


def _begun_run(
    run: range,
    bodies: Sequence[bytes],
    key: str | None,
    tag: str | None,
    parent: SpanContext | None,
) -> Begun:
    sizes = list(map(len, bodies[run.start : run.stop]))
    lights = sends.begin_lights(run, sizes, key, tag, parent)
    return run.start, lights, lights.encoded
