"""Around each call: what comes is checked, what happens is counted, and every error is a status."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from prometheus_client import Counter

from duemq.errors import DuemqError, Internal, InvalidArgument
from duemq.transport import status
from duemq_server.serving.metrics import RpcMetrics

log = logging.getLogger(__name__)

# Between two log lines of one method about errors of one type.
LOG_INTERVAL_S = 60.0


class _Malformed:
    """What came in place of a request: bytes that are not one."""

    def __init__(self, error: DecodeError) -> None:
        self.error = error


def never_raising(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """gRPC answers UNKNOWN where a deserializer raises; the guard can say what is wrong."""

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return _Malformed(error)

    return decoded


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise _undecodable(request.error)
    return request


def _undecodable(error: DecodeError) -> InvalidArgument:
    return InvalidArgument(f"the request cannot be decoded: {error}", field="request")


def guard_coroutine(behaviour: Any, watch: "Watch") -> Any:
    """The same coroutine function, of which every call is guarded."""

    async def call(request: Any, context: Any) -> Any:
        async with _Guard(watch, context):
            return await behaviour(_checked(request), context)

    return call


def guard_generator(behaviour: Any, watch: "Watch") -> Any:
    """As `guard_coroutine`, of an asynchronous generator function."""

    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        async with _Guard(watch, context), aclosing(behaviour(_checked(request), context)) as found:
            async for answer in found:
                yield answer

    return call


class _Guard:
    """Around one call: counts it, and ends it with the status of the error that it raised."""

    __slots__ = ("_began", "_context", "_watch")

    def __init__(self, watch: "Watch", context: Any) -> None:
        self._watch = watch
        self._context = context

    async def __aenter__(self) -> None:
        self._began = self._watch.begin()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cause = _cause(error)
        if cause is None:
            self._watch.end(self._began, "OK")
        elif isinstance(cause, grpc.aio.InternalError):  # a write: the client went away
            self._watch.end(self._began, "CANCELLED")
            raise asyncio.CancelledError from None
        elif isinstance(cause, Exception) and not isinstance(cause, grpc.aio.AbortError):
            sent = self._watch.to_send(cause)
            code = status.status_of(sent)
            self._watch.end(self._began, code.name)
            await self._context.abort(code, status.details(sent), status.trailer(sent))
        else:  # the client went away, the server stops, or the method aborted by itself
            self._watch.end(self._began, "CANCELLED")
            if cause is not error:
                raise cause


def _cause(error: BaseException | None) -> BaseException | None:
    """What a task group's exception comes down to: its first error, or the cancellation."""
    while isinstance(error, BaseExceptionGroup):
        _, errors = error.split(asyncio.CancelledError)
        if errors is None:
            return asyncio.CancelledError()
        error = errors.exceptions[0]
    return error


class Watch:
    """The metrics and the log of one method."""

    def __init__(self, service: str, method: str, unary: bool, metrics: RpcMetrics | None) -> None:
        self._labels = (service, method)
        self._metrics = metrics
        self._seconds = metrics.seconds.labels(*self._labels) if metrics and unary else None
        self._running = metrics.running.labels(*self._labels) if metrics else None
        self._handled: dict[str, Counter] = {}
        self._quiet_until_s: dict[type[Exception], float] = {}

    def begin(self) -> float:
        """A call has come; answers when, for `end`."""
        if self._running is not None:
            self._running.inc()
        return time.perf_counter()

    def end(self, began: float, outcome: str) -> None:
        """It is over."""
        if self._metrics is None or self._running is None:
            return
        self._running.dec()
        if outcome not in self._handled:
            self._handled[outcome] = self._metrics.handled.labels(*self._labels, outcome)
        self._handled[outcome].inc()
        if self._seconds is not None:
            self._seconds.observe(time.perf_counter() - began)

    def _log(self, error: Exception) -> None:
        """In full once a minute: whoever can cause an error can cause thousands."""
        now_s = time.monotonic()
        if now_s < self._quiet_until_s.get(type(error), 0.0):
            return
        self._quiet_until_s[type(error)] = now_s + LOG_INTERVAL_S
        log.error("%s/%s failed", *self._labels, exc_info=error)

    def to_send(self, error: Exception) -> DuemqError:
        """The error for the client.  What the server did not expect is logged in full."""
        if isinstance(error, DuemqError) and not isinstance(error, Internal):
            return error
        if isinstance(error, DecodeError):  # servicers catch those of what lies in a request
            return _undecodable(error)
        self._log(error)
        if isinstance(error, DuemqError):
            return error
        method = self._labels[1]
        return Internal(f"{method} failed: {type(error).__name__}; see the server's log")
