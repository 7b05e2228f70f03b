"""What a failed callback means for its message.  Pure.

raise RetryLater("5m")          again after five minutes
raise DeadLetter("why")         never again: to %DLQ%<group> at once
raise BatchFailed({m: error})   of a list only `m`, as this error says
any other exception             again when the group's retry policy says
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.protocol.due import UNITS_MS, delay_ms
from duemq.protocol.limits import ERROR_CHARACTERS_MAX
from duemq.protocol.retry_policy import DELAY_MS_MAX

if TYPE_CHECKING:
    from duemq.message import Message


class RetryLater(Exception):
    """Raised by a callback: deliver this message (or this batch) again after `delay`.

    `delay`: seconds, a timedelta, or text as "250ms", "5s", "1h30m"; 0 is at once.  It counts as a
    retry: after the last one that the group's policy allows the message is a dead letter.  In
    ordered consumption the queue or key waits for so long.  At most 366 days.  Raises
    InvalidArgument.
    """

    def __init__(self, delay: float | timedelta | str, reason: str = "") -> None:
        self.delay_ms = delay_ms(delay)
        if self.delay_ms > DELAY_MS_MAX:
            raise checks.wrong("delay", delay, f"at most {DELAY_MS_MAX // UNITS_MS['d']} days")
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


class BatchFailed(Exception):
    """Raised by a callback that gets lists: these messages failed, the others of the list are done.

    `failures`: an exception for each message that failed; any exception, RetryLater and DeadLetter
    too, means for its message what raising it for that message alone would.  So name a message
    that was not tried as well.  Where the list is in order (`order="queue"`, or of one ordering
    key), only what lies in front of the first message named is done: that one comes again, and all
    that follows it in the list behind it.

    If a message is named that is not in the list, the whole list failed.  Raises InvalidArgument.
    """

    def __init__(self, failures: Mapping[Message, BaseException]) -> None:
        self.failures = _checked(failures)
        kinds = dict.fromkeys(type(error).__name__ for error in self.failures.values())
        super().__init__(f"{len(self.failures)} of a batch: {', '.join(kinds) or 'none'}")

    def __reduce__(self) -> tuple[object, ...]:
        return BatchFailed, (self.failures,)


def _checked(failures: Any) -> dict[Message, BaseException]:
    if not isinstance(failures, Mapping):
        raise _no_failures(type(failures).__name__)
    for error in failures.values():
        if not isinstance(error, BaseException) or isinstance(error, BatchFailed):
            raise _no_failures(type(error).__name__)
    return dict(failures)


def _no_failures(given: str) -> InvalidArgument:
    return checks.wrong("failures", given, "{message: exception}, none of them a BatchFailed")


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


@dataclass(frozen=True, slots=True)
class Failed:
    """Messages of a list that are not done: `count` of them from `index` on, together."""

    index: int
    count: int
    error: BaseException


def failures_of(error: BaseException, messages: Sequence[Message]) -> list[Failed]:
    """What is not done of the messages that the callback was given, in their order."""
    error = meant(error, len(messages))
    if not isinstance(error, BatchFailed):
        return [Failed(0, len(messages), error)]
    try:
        errors = _checked(getattr(error, "failures", None))
    except InvalidArgument:  # an application's own kind may not have called __init__
        return [Failed(0, len(messages), error)]
    places = {message: index for index, message in enumerate(messages)}
    for named in errors:
        if named not in places:
            return [Failed(0, len(messages), _not_in_the_batch(named, error))]
    failures = [Failed(places[message], 1, meant(each)) for message, each in errors.items()]
    return sorted(failures, key=lambda failed: failed.index)


def errors_of(error: BaseException, messages: Sequence[Message]) -> dict[int, BaseException]:
    """The same: an error for each message that is not done, by its place in the list."""
    return {
        index: failed.error
        for failed in failures_of(error, messages)
        for index in range(failed.index, failed.index + failed.count)
    }


def meant(error: BaseException, messages: int = 1) -> BaseException:
    """What a group of exceptions that was raised for so many messages stands for, or itself.

    Of several it may be about one: a TaskGroup cancels what does the others.
    """
    first, *others = leaves = list(_leaves(error))
    if isinstance(first, BatchFailed):
        return error if others else first
    kinds = (DeadLetter, RetryLater) if messages == 1 else ()
    return first if any(all(isinstance(x, kind) for x in leaves) for kind in kinds) else error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _not_in_the_batch(named: object, cause: BatchFailed) -> InvalidArgument:
    error = InvalidArgument(
        f"failures: {named!r} is no message of this batch: all of it counts as failed",
        field="failures",
        value=named,
        limit="messages that the callback was given",
    )
    error.__cause__ = cause
    return error


def outcome_of(error: BaseException) -> Outcome:
    """What an exception of the callback asks for."""
    if isinstance(error, RetryLater):
        return Outcome(_cut(_text_of(error)), delay_ms=getattr(error, "delay_ms", None))
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
