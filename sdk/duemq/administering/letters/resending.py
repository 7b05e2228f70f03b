"""Dead letters: messages that a group has given up, and what becomes of them.  Pure.

They lie in the topic %DLQ%<group> of the broker that they were consumed from, one after the other,
until its retention takes them or they are purged; one that is sent again is marked.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from duemq.errors import DuemqError, InvalidArgument
from duemq.message import Message, Origin, Outgoing
from duemq.protocol import checks
from duemq.sent import Receipt
from duemq.v1.message_pb2 import Record

DEAD_LETTER_ID = "duemq-dead-letter-id"
"""Property of a message that was sent again: the id that it died with."""


class Letter(Message):
    """A dead letter, as its broker found it."""

    __slots__ = ("resent",)

    resent: bool
    """It was sent again."""

    def __init__(
        self, record: Record, origin: Origin, offset: int, store_ms: int, resent: bool
    ) -> None:
        """Made by admin clients."""
        super().__init__(record, origin, offset, store_ms)
        self.resent = resent


OnSent = Callable[[Letter, Receipt | DuemqError], object]
"""Told of each dead letter that was sent again, or was not."""


@dataclass(frozen=True, slots=True)
class Resent:
    """What `resend_dead_letters` has done."""

    sent: int
    failed: int
    """They are told to `on_sent`, each with its error."""


class Resending:
    """Counts what is sent again, and tells of it."""

    def __init__(self, on_sent: OnSent | None) -> None:
        if on_sent is not None:
            checks.plain_function("on_sent", on_sent, "a letter and an outcome")
        self._on_sent = on_sent
        self._sent = self._failed = 0

    def add(self, outcomes: Iterable[tuple[Letter, Receipt | DuemqError]]) -> None:
        """Letters, each with its receipt or the error that it was not sent for."""
        for letter, outcome in outcomes:
            if isinstance(outcome, DuemqError):
                self._failed += 1
            else:
                self._sent += 1
            if self._on_sent is not None:
                self._on_sent(letter, outcome)

    def done(self) -> Resent:
        """What was done."""
        return Resent(self._sent, self._failed)


def target_of(letter: Message, to_topic: str | None) -> str:
    """Where a dead letter goes.  Raises InvalidArgument if that is not known."""
    if to_topic is not None:
        return to_topic
    if letter.retry is None:
        raise InvalidArgument(
            f"dead letter {letter.message_id} does not say where it lay first: name a topic",
            field="to_topic",
        )
    return letter.retry.origin_topic


def copy_of(letter: Message) -> Outgoing:
    """The message as it is sent again: a new one, that names the one that died."""
    return Outgoing(
        letter.body,
        key=letter.key,
        tag=letter.tag,
        ordering_key=letter.ordering_key,
        properties={**letter.properties, DEAD_LETTER_ID: letter.message_id},
    )
