"""Every error that DueMQ raises.  Pure: no gRPC, no protobuf.

    DuemqError
    ├── Rejected              the request is wrong; sending it again is useless
    │   ├── InvalidArgument
    │   ├── TooLarge
    │   ├── TopicNotFound
    │   ├── TopicExists
    │   ├── QueueNotFound
    │   ├── GroupNotFound
    │   ├── OffsetOutOfRange
    │   ├── PermissionDenied
    │   ├── InstanceNotFound
    │   ├── TimerExists
    │   ├── ScheduleNotFound
    │   └── Unsupported       an older server that does not know the call (never on the wire)
    ├── Fenced                the caller was overtaken by a newer one
    │   ├── FencedProducer
    │   ├── OutOfSequence
    │   ├── FencedMember
    │   ├── NotCoordinator
    │   ├── FencedTimer
    │   └── TopicReplaced
    ├── Unavailable           try again, here or elsewhere
    │   ├── NotReady
    │   ├── Overloaded
    │   ├── ReadOnly
    │   ├── Timeout
    │   └── PartialAnswer     a broker's part is missing; has the rest (never on the wire)
    ├── Internal              the server is broken
    │   ├── Corrupt
    │   └── InvariantError    a bug: something that cannot be, is
    ├── NotAllSent            of a send_many, or when a producer closes (never on the wire)
    └── Closed                this client object was closed (never on the wire)

Which gRPC status each one travels as: status.py.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from duemq.sent import PendingSend, Receipt  # which know no errors

__all__ = [
    "Closed",
    "Corrupt",
    "DuemqError",
    "ErrorCode",
    "Fenced",
    "FencedMember",
    "FencedProducer",
    "FencedTimer",
    "GroupNotFound",
    "InstanceNotFound",
    "Internal",
    "InvalidArgument",
    "InvariantError",
    "NotAllSent",
    "NotCoordinator",
    "NotReady",
    "OffsetOutOfRange",
    "OutOfSequence",
    "Overloaded",
    "PartialAnswer",
    "PermissionDenied",
    "QueueNotFound",
    "ReadOnly",
    "Rejected",
    "ScheduleNotFound",
    "Timeout",
    "TimerExists",
    "TooLarge",
    "TopicExists",
    "TopicNotFound",
    "TopicReplaced",
    "Unavailable",
    "Unsupported",
]


class ErrorCode(enum.IntEnum):
    """The codes of duemq.v1.ErrorCode, number by number."""

    ERROR_CODE_UNSPECIFIED = 0
    INVALID_ARGUMENT = 1
    TOO_LARGE = 2
    TOPIC_NOT_FOUND = 3
    TOPIC_EXISTS = 4
    QUEUE_NOT_FOUND = 5
    GROUP_NOT_FOUND = 6
    OFFSET_OUT_OF_RANGE = 7
    PERMISSION_DENIED = 8
    INSTANCE_NOT_FOUND = 9
    TIMER_EXISTS = 10
    SCHEDULE_NOT_FOUND = 11
    FENCED_PRODUCER = 20
    OUT_OF_SEQUENCE = 21
    FENCED_MEMBER = 22
    NOT_COORDINATOR = 23
    FENCED_TIMER = 24
    TOPIC_REPLACED = 25
    UNAVAILABLE = 40
    NOT_READY = 41
    OVERLOADED = 42
    READ_ONLY = 43
    TIMEOUT = 44
    INTERNAL = 60
    CORRUPT = 61


class DuemqError(Exception):
    """Anything that goes wrong in DueMQ.

    `message` is for people and complete without the rest.  `field`, `value` and `limit` name what
    the caller got wrong, where that can be said, and are empty otherwise.  `retryable` says whether
    the same request can succeed later.  `answers`: of a list of timers, by position,
    those that were answered.
    """

    code: ClassVar[ErrorCode] = ErrorCode.ERROR_CODE_UNSPECIFIED
    retryable_by_default: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: object = "",
        limit: object = "",
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = str(value)
        self.limit = str(limit)
        self.retryable = self.retryable_by_default if retryable is None else retryable
        self.answers: Mapping[int, Any] = {}

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.__dict__.copy())


def _rebuild(kind: type[DuemqError], message: str, state: dict[str, object]) -> DuemqError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class Rejected(DuemqError):
    """The request is wrong; sending it again is useless."""


class InvalidArgument(Rejected):
    """A value is missing, malformed or outside its limits."""

    code = ErrorCode.INVALID_ARGUMENT


class TooLarge(Rejected):
    """A message, batch or property is larger than the limit."""

    code = ErrorCode.TOO_LARGE


class TopicNotFound(Rejected):
    """No such topic there."""

    code = ErrorCode.TOPIC_NOT_FOUND


class TopicExists(Rejected):
    """The topic to be created is there already."""

    code = ErrorCode.TOPIC_EXISTS


class QueueNotFound(Rejected):
    """The topic has no queue of that number."""

    code = ErrorCode.QUEUE_NOT_FOUND


class GroupNotFound(Rejected):
    """The broker knows no such consumer group."""

    code = ErrorCode.GROUP_NOT_FOUND


class OffsetOutOfRange(Rejected):
    """The offset is below the oldest message kept or above the newest."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE


class PermissionDenied(Rejected):
    """The caller may not do this."""

    code = ErrorCode.PERMISSION_DENIED


class InstanceNotFound(Rejected):
    """No nameserver remembers such a broker or timer service."""

    code = ErrorCode.INSTANCE_NOT_FOUND


class ScheduleNotFound(Rejected):
    """No schedule has that name."""

    code = ErrorCode.SCHEDULE_NOT_FOUND


class TimerExists(Rejected):
    """A message waits under that timer key, and was not to be replaced (`if_absent`).

    `handle` and `due_ms`: of what waits there.
    """

    code = ErrorCode.TIMER_EXISTS

    def __init__(
        self,
        message: str,
        *,
        handle: str = "",
        due_ms: int = 0,
        **named: Any,
    ) -> None:
        super().__init__(message, **named)
        self.handle = handle
        self.due_ms = due_ms


class Unsupported(Rejected):
    """The server does not know this call: it is of an older version."""


class Fenced(DuemqError):
    """The caller was overtaken by a newer one, or is behind its own state."""


class FencedProducer(Fenced):
    """A producer with the same id and a newer epoch has taken over."""

    code = ErrorCode.FENCED_PRODUCER


class OutOfSequence(Fenced):
    """The batch's sequence is not the next one of its producer and queue."""

    code = ErrorCode.OUT_OF_SEQUENCE


class FencedMember(Fenced):
    """The queue was given to another member under a newer generation."""

    code = ErrorCode.FENCED_MEMBER


class NotCoordinator(Fenced):
    """Another broker coordinates this group."""

    code = ErrorCode.NOT_COORDINATOR


class FencedTimer(Fenced):
    """Another timer service has this queue of delayed messages."""

    code = ErrorCode.FENCED_TIMER


class TopicReplaced(Fenced):
    """The topic was deleted and made anew: positions in its queues are of one that is gone."""

    code = ErrorCode.TOPIC_REPLACED


class Unavailable(DuemqError):
    """The server cannot be reached or cannot answer now; try again, here or elsewhere."""

    code = ErrorCode.UNAVAILABLE
    retryable_by_default = True


class NotReady(Unavailable):
    """The server has just started and does not know enough yet."""

    code = ErrorCode.NOT_READY


class Overloaded(Unavailable):
    """A queue of the server is full, or the buffer of an asyncio producer."""

    code = ErrorCode.OVERLOADED


class ReadOnly(Unavailable):
    """The broker cannot store now: its disk is full or read-only."""

    code = ErrorCode.READ_ONLY


class Timeout(Unavailable):
    """No answer within the deadline.  What was asked may have been done."""

    code = ErrorCode.TIMEOUT


@dataclass(frozen=True, slots=True)
class MissingBroker:
    """A broker whose part of an answer is not there."""

    name: str
    error: str
    """Why it did not answer."""


class PartialAnswer(Unavailable):
    """A broker is away, so that an answer of all of them would not be whole.

    `missing`: who, and why.  `partial`: what the others answered, in the form of the whole answer
    (empty if it was handed out before); None if that is worth nothing.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[MissingBroker] = (),
        partial: object = None,
        **named: Any,
    ) -> None:
        super().__init__(message, **named)
        self.missing = tuple(missing)
        self.partial = partial


class Internal(DuemqError):
    """The server failed in a way that it does not expect."""

    code = ErrorCode.INTERNAL


class Corrupt(Internal):
    """Stored data is damaged."""

    code = ErrorCode.CORRUPT


class InvariantError(Internal):
    """A bug in DueMQ: something that cannot be, is."""


class NotAllSent(DuemqError):
    """Some messages of a `send_many` were not stored, or some when a producer closed.

    `failures`: position → error.  Of a send_many: position among the messages given; `receipts`: of
    all messages, the receipt of one that failed raises its error.  Of a close: position in
    `unsent`, the pending receipts of what was submitted, is not stored, and nobody was told of.
    """

    def __init__(
        self,
        message: str,
        *,
        receipts: "Sequence[Receipt]" = (),
        failures: Mapping[int, DuemqError] | None = None,
        unsent: "Sequence[PendingSend]" = (),
    ) -> None:
        super().__init__(message)
        self.receipts = receipts
        self.failures = failures or {}
        self.unsent = unsent


class Closed(DuemqError):
    """The client object was closed."""
