"""The event loop "duemq-io": one background thread that all synchronous clients of a process share.

It starts with the first client and ends with the last.  It is a daemon: a client that was never
closed does not keep the process.  After a fork (channel.py) all in the child answers `Closed`.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

from duemq.errors import Closed
from duemq.transport import channel
from duemq.transport.closing import AsyncClient, Closing
from duemq.transport.tuning import new_event_loop

NAME = "duemq-io"
# To end after the last client closed: cancelled tasks, gRPC's own shutdown.
STOP_TIMEOUT_S = 5.0
LINGER_S = 0.02

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")


class LoopThread:
    """The shared thread.  Every `acquire` is followed by one `release`."""

    # Guards _shared and the users of it.  A finalizer may call while it is held.
    _lock = threading.RLock()
    _shared: "LoopThread | None" = None

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self.loop.set_exception_handler(_on_exception)
        self._users = 0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> "LoopThread":
        """The process's loop thread; starts it for its first user.

        Raises Closed in a process that was forked after there had been one.
        """
        channel.check_fork()  # first: in a child nobody may be left to release the lock
        with cls._lock:
            shared = cls._shared
            if shared is None:
                shared = cls._shared = LoopThread()
            shared._users += 1
            return shared

    def release(self) -> None:
        """Ends the thread with its last user.  Not from the thread itself."""
        with LoopThread._lock:
            self._users -= 1
            if self._users or self.foreign:
                return
            LoopThread._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)

    @property
    def foreign(self) -> bool:
        """It was made in a parent process: the thread does not exist here."""
        return self._pid != os.getpid()

    @property
    def inside(self) -> bool:
        """The caller runs in this thread, so that to wait for it would be to wait for ever."""
        return threading.get_ident() == self._thread.ident

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it in the loop and waits for it.  Raises Closed if that ends meanwhile."""
        call: _Call[T] | None = None
        try:
            if not (self.foreign or self.inside):
                with LoopThread._lock:  # a call that came after the loop's end would wait for ever
                    # Not `is_alive`: where a signal's handler raises there, it is False for ever.
                    if self._users and not self.loop.is_closed():
                        call = _Call()
                        self.loop.call_soon_threadsafe(call.begin, coroutine)
            if call is None:
                coroutine.close()
                self.refuse()
            return call.answer()
        except BaseException:
            if call is not None:
                with suppress(RuntimeError):  # the loop is closed
                    self.loop.call_soon_threadsafe(call.cancel)
            raise

    def refuse(self) -> NoReturn:
        """Raises what is wrong with a call from here."""
        if self.foreign:
            raise Closed(f"this client belongs to the parent process: {channel.FORK_REMEDY}")
        if self.inside:
            raise RuntimeError(f"a blocking call inside the thread {NAME}: use duemq.aio there")
        raise Closed("the client is closed")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        with closing(self.loop):  # whatever ends it: see `run`
            try:
                self.loop.run_forever()
            finally:
                for task in (tasks := asyncio.all_tasks(self.loop)):
                    task.cancel()
                self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
                # What gRPC still has to tell of the calls that just ended finds its loop open.
                self.loop.run_until_complete(asyncio.sleep(LINGER_S))
                asyncio.set_event_loop(None)


class _Call(Generic[T]):
    """No Future: where a signal's handler raises in one, the loop may wait for its lock."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None
        self._gate = shut_gate()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """In the loop."""
        self._task = asyncio.create_task(coroutine)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # heard of, also where the caller is gone
        self._gate.release()

    def cancel(self) -> None:
        """In the loop."""
        if self._task is not None:
            self._task.cancel()

    def answer(self) -> T:
        """Waits for it.  Raises Closed."""
        self._gate.acquire()
        assert self._task is not None
        try:
            return self._task.result()
        except asyncio.CancelledError:
            raise Closed("the client was closed meanwhile") from None


def shut_gate() -> threading.Lock:
    """Where a thread waits until another releases it."""
    gate = threading.Lock()  # guards nothing
    gate.acquire()
    return gate


def refuse_inside() -> None:
    """For what waits for the thread in another way than by `run`.

    Raises RuntimeError in it, Closed in a forked child, which has none.
    """
    shared = LoopThread._shared
    if shared is not None and (shared.inside or shared.foreign):
        shared.refuse()


class Hosted:
    """An asyncio client that lives in the loop thread, for the synchronous one in front of it."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self.client = client
        self.closed = False
        self._name = name
        # Guards closed, and the thread's release.  A signal handler may close while it is held.
        self._closing = threading.RLock()
        self._thread: LoopThread | None = None

    def start(self) -> None:
        """Raises what the client's start raises, and Closed as `LoopThread.acquire`."""
        with self._closing:
            if self._thread is not None or self.closed:
                raise Closed(f"{self._name} is {'closed' if self.closed else 'started once'}")
            self._thread = thread = LoopThread.acquire()
        try:
            thread.run(self.client.start())
        except BaseException:
            with self._closing:
                if not self.closed:  # else `close`, which ended this, releases it
                    self._thread = None
                    thread.release()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it in the loop and waits for it.  Raises Closed."""
        thread = self._thread
        if thread is None or self.closed:
            coroutine.close()
            state = "closed" if self.closed else "not started: use `with` or `start()`"
            raise Closed(f"{self._name} is {state}")
        return thread.run(coroutine)

    def close(self) -> None:
        """Closes it: before the start it starts no more.  Who comes second waits for the first.

        Nothing in a forked child.
        """
        with self._closing:
            thread, first = self._thread, not self.closed
            if thread is not None and thread.inside:
                if first:  # it stays open
                    thread.refuse()
                return
            self.closed = True
        if thread is None or thread.foreign:
            return
        try:
            thread.run(self.client.close())
        except Closed:
            if first:
                raise
        finally:
            if first:
                thread.release()


class Face(Closing):
    """A synchronous client: what all have in common."""

    _hosted: Hosted

    def close(self) -> None:
        """Ends the connections.  Idempotent."""
        self._hosted.close()


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """A coroutine method of an asyncio client, for its Face: the same, but it waits."""

    @wraps(method)
    def call(face: Face, /, *args: P.args, **kwargs: P.kwargs) -> T:
        own = getattr(face._hosted.client, method.__name__)  # a subclass may have its own
        return face._hosted.run(own(*args, **kwargs))

    return call


def in_loop(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A plain method of an asyncio client, for its Face: called in the loop, which it needs."""

    @wraps(method)
    def call(face: Face, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def later() -> T:
            answer: T = getattr(face._hosted.client, method.__name__)(*args, **kwargs)
            return answer

        return face._hosted.run(later())

    return call


def as_in(
    method: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Decorates what a Face does in its own way: arguments and description are the method's."""
    return described_as(method)


def described_as(method: Callable[..., object]) -> Callable[[F], F]:
    """Decorates with the documentation of `method`, and its parameters as `help` shows them."""

    def describe(function: F) -> F:
        answers = signature(function).return_annotation
        function.__doc__ = method.__doc__
        function.__signature__ = signature(method).replace(  # type: ignore[attr-defined]
            return_annotation=answers
        )
        return function

    return describe


def _on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # With a second event loop in the process, gRPC wakes both for one event, and one finds its pipe
    # empty: harmless (grpc/grpc#25364).
    poller = "PollerCompletionQueue" in str(context.get("handle", ""))
    if poller and isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)
