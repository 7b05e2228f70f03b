"""What a failed callback means for its message.  Pure.

raise RetryLater("5m")      again after five minutes
raise DeadLetter("why")     never again: to %DLQ%<group> at once
any other exception         again when the group's retry policy says
"""

from dataclasses import dataclass
from datetime import timedelta

from duemq.due import delay_ms

ERROR_CHARACTERS_MAX = 1_024
"""Of the reason that travels along with a message; brokers cut off the rest."""


class RetryLater(Exception):
    """Raised by a callback: deliver this message (or this batch) again after `delay`.

    `delay`: seconds, a timedelta, or text as "250ms", "5s", "1h30m"; 0 is at once.  It counts as a
    retry: after the last one that the group's policy allows the message is a dead letter.  In
    ordered consumption the queue or key waits for so long.  Raises InvalidArgument.
    """

    def __init__(self, delay: float | timedelta | str, reason: str = "") -> None:
        self.delay_ms = delay_ms(delay)
        self.reason = reason
        super().__init__(reason or f"again in {self.delay_ms / 1000:g} s")

    def __reduce__(self) -> tuple[object, ...]:
        return RetryLater, (timedelta(milliseconds=self.delay_ms), self.reason)


class DeadLetter(Exception):
    """Raised by a callback: this message (or this batch) cannot be processed, ever.

    It goes to %DLQ%<group> at once, with `reason`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class NotTaken(Exception):
    """Raised by the callback of a consumer that is about to close: leaves the message as it is.

    It is neither done nor failed: it is not committed, and comes again to whoever has the queue
    next.
    """


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to become of a message whose callback failed."""

    error: str
    """Why; travels along."""
    delay_ms: int | None = None
    """As the callback chose; None: as the group's policy says."""
    dead_letter: bool = False


def outcome_of(error: BaseException) -> Outcome:
    """What an exception of the callback asks for."""
    if isinstance(error, RetryLater):
        return Outcome(_cut(_text_of(error)), delay_ms=error.delay_ms)
    if isinstance(error, DeadLetter):
        return Outcome(_cut(_text_of(error)), dead_letter=True)
    text = _text_of(error)
    name = type(error).__name__
    return Outcome(_cut(f"{name}: {text}" if text else name))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an application's __str__ may do anything
        return ""


def _cut(text: str) -> str:
    """As it can travel: what is no Unicode text (lone surrogates) is escaped."""
    return text.encode(errors="backslashreplace").decode()[:ERROR_CHARACTERS_MAX]
