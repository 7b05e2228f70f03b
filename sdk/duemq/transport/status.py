"""Errors as they travel: the one table of error class, ErrorCode and gRPC status, both ways.

A failed call carries the status, the message, and in its trailer `duemq-error-bin` the whole
duemq.v1.Error.  Answers that speak of several things (a batch, a queue) carry the same Error
inside.  Where a failure comes without the trailer, it was not ours: gRPC, a proxy or a foreign
server made it, and the status alone decides.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from duemq import errors
from duemq.errors import DuemqError
from duemq.v1 import error_pb2

TRAILER = "duemq-error-bin"
# Of `message`, `field`, `value` and `limit` on the wire each, in characters.  HTTP/2 servers and
# proxies refuse headers above 8 KiB in sum.
TEXT_CHARS_MAX = 1024

# The table.  Each ErrorCode has one row; protos/README.md repeats it for other languages.
STATUSES: dict[type[DuemqError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TopicNotFound: grpc.StatusCode.NOT_FOUND,
    errors.TopicExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.QueueNotFound: grpc.StatusCode.NOT_FOUND,
    errors.GroupNotFound: grpc.StatusCode.NOT_FOUND,
    errors.OffsetOutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.InstanceNotFound: grpc.StatusCode.NOT_FOUND,
    errors.ScheduleNotFound: grpc.StatusCode.NOT_FOUND,
    errors.TimerExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.FencedProducer: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfSequence: grpc.StatusCode.FAILED_PRECONDITION,
    errors.FencedMember: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotCoordinator: grpc.StatusCode.FAILED_PRECONDITION,
    errors.FencedTimer: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TopicReplaced: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ReadOnly: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Timeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Internal: grpc.StatusCode.INTERNAL,
    errors.Corrupt: grpc.StatusCode.DATA_LOSS,
}

_BY_CODE: dict[int, type[DuemqError]] = {int(kind.code): kind for kind in STATUSES}

# For failures without our trailer.
_BY_STATUS: dict[grpc.StatusCode, type[DuemqError]] = {
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.UNKNOWN: errors.Internal,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Timeout,
    grpc.StatusCode.NOT_FOUND: errors.Rejected,
    grpc.StatusCode.ALREADY_EXISTS: errors.Rejected,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Rejected,
    grpc.StatusCode.ABORTED: errors.Unavailable,
    grpc.StatusCode.OUT_OF_RANGE: errors.OffsetOutOfRange,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
    grpc.StatusCode.INTERNAL: errors.Internal,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DATA_LOSS: errors.Internal,
}

T = TypeVar("T")


def _short(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 1] + "…"


def status_of(error: DuemqError) -> grpc.StatusCode:
    """The status that `error` travels as; of a class without a row, that of its nearest base."""
    for kind in type(error).__mro__:
        if kind in STATUSES:
            return STATUSES[kind]
    return grpc.StatusCode.INTERNAL


def to_proto(error: DuemqError) -> error_pb2.Error:
    """`error` as it travels, in-band or in the trailer."""
    return error_pb2.Error(
        code=error_pb2.ErrorCode.Name(error.code or errors.ErrorCode.INTERNAL),
        message=_short(error.message),
        field=_short(error.field),
        value=_short(error.value),
        limit=_short(error.limit),
        retryable=error.retryable,
    )


def from_proto(error: error_pb2.Error) -> DuemqError:
    """The exception for an Error of an answer; Internal for an unknown code of a newer server."""
    kind = _BY_CODE.get(error.code, errors.Internal)
    return kind(
        error.message,
        field=error.field,
        value=error.value,
        limit=error.limit,
        retryable=error.retryable,
    )


def trailer(error: DuemqError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries `error`."""
    return ((TRAILER, to_proto(error).SerializeToString()),)


def details(error: DuemqError) -> str:
    """The text that goes with the status."""
    return _short(error.message)


def from_rpc_error(error: grpc.RpcError, peer: str = "") -> DuemqError:
    """The exception for a failed call, to `peer` (host:port) where known.  Never raises."""
    sent = _sent_error(error)
    if sent is not None:
        return from_proto(sent)
    status = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = (error.details() if hasattr(error, "details") else None) or str(error)
    kind = _BY_STATUS.get(status, errors.Internal)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        kind = errors.TooLarge  # gRPC's own limit on a message
    if status is grpc.StatusCode.UNIMPLEMENTED:
        details = f"it does not know this call; is it an older version? {details}"
    name = status.name if status is not None else "UNKNOWN"
    return kind(f"{peer}: {details} ({name})" if peer else f"{details} ({name})")


def _sent_error(error: grpc.RpcError) -> error_pb2.Error | None:
    metadata: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in metadata or ():
        if key == TRAILER:
            try:
                return error_pb2.Error.FromString(value)
            except DecodeError:
                return None
    return None


async def answer(call: Awaitable[T], peer: str = "") -> T:
    """Awaits a call (or a read or write of a stream) and turns its failure into a DuemqError.

    That of a call whose channel was closed, too: its peer is not whom it was called for any more.
    """
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error, peer) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise errors.Unavailable(f"{peer}: the call was given up") from None
