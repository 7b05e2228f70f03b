"""The consumers for programs without an event loop: the asyncio ones on the thread "duemq-io".

Callbacks of a push consumer run in worker threads of their own, never in "duemq-io".
"""

import threading
from contextlib import suppress
from typing import Any, Literal, Self, Unpack, overload

from duemq.consumer import pull, push
from duemq.consumer.delivery.workers import OnEither, OnMessage, OnMessages
from duemq.consumer.fetching.subscription import Topics
from duemq.consumer.settings import ConsumerSettings, PushOptions
from duemq.errors import Closed, DuemqError, MissingBroker
from duemq.message import Message
from duemq.protocol.balance import MessageQueue
from duemq.settings import Addresses
from duemq.transport.closing import Closing
from duemq.transport.loop_thread import (
    Face,
    Hosted,
    LoopThread,
    as_in,
    blocking,
    described_as,
    in_loop,
)


class PushConsumer(Closing):
    """Receives a group's messages and calls `callback` with each, or with lists of them.

    Members of one group share the queues of its topics; every group receives everything.  At least
    once: what was not committed when a consumer died comes again.  A message (or list) for which
    the callback raises, or runs for longer than `processing_timeout_s`, is sent back to its broker:
    it comes again when the group's retry policy says, to any member, and after the last retry it is
    a dead letter.  `raise duemq.RetryLater(delay)` chooses the delay, `raise
    duemq.DeadLetter(reason)` gives up at once, `raise duemq.BatchFailed({message: error})` says
    which messages of a list failed.  None of this holds up other messages.

    In order, a failure suspends the queue or key for `suspend_s` and the callback is called again
    in place, up to `retries_in_order_max` times, before the message is a dead letter.

        with PushConsumer("billing", "orders", print) as consumer:
            consumer.run()
    """

    @overload
    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: OnMessage,
        *,
        batch: Literal[False] = False,
        nameserver: Addresses | None = None,
        **options: Unpack[PushOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: OnMessages,
        *,
        batch: Literal[True],
        nameserver: Addresses | None = None,
        **options: Unpack[PushOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: OnEither,
        *,
        batch: bool,
        nameserver: Addresses | None = None,
        **options: Unpack[PushOptions],
    ) -> None: ...
    @described_as(push.PushConsumer.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        self._consumer = push.PushConsumer(*args, **options)
        self._thread: LoopThread | None = None
        # Guards _thread and _started.  A signal handler may close while it is held.
        self._releasing = threading.RLock()
        self._started = False

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._consumer.group

    @property
    def settings(self) -> ConsumerSettings:
        """As given, or the defaults."""
        return self._consumer.settings

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are consumed now."""
        return self._consumer.queues

    @property
    def missing(self) -> tuple[MissingBroker, ...]:
        """Brokers that are away: what they store comes when they are back."""
        return self._consumer.missing

    @as_in(push.PushConsumer.start)
    def start(self) -> None:
        with self._releasing:
            if self._started:
                raise Closed("a consumer is started once")
            self._thread = thread = LoopThread.acquire()
            self._started = True
        try:
            thread.run(self._consumer.start())
        except BaseException:
            try:
                self.close()  # Ctrl-C: the group may have this member by now
            finally:
                self._release()
                self._started = False  # `run` raises
            raise

    def run(self) -> None:
        """Starts, if need be, and consumes until closed.  Raises what ended the membership.

        `close` may be called from another thread or from the callback.  Ctrl-C closes and raises.
        """
        if not self._started:
            self.start()
        thread = self._thread
        if thread is None:
            return
        try:
            thread.run(self._consumer.run())
        except Closed:
            if self._thread is thread:
                raise  # else `close` in another thread was the faster
        finally:
            self.close()

    @as_in(push.PushConsumer.close)
    def close(self) -> None:
        with self._releasing:
            thread = self._thread
            self._started = True  # whoever starts it now is too late
        if thread is None or thread.foreign:
            return
        if self._consumer.in_callback():
            thread.loop.call_soon_threadsafe(self._consumer.begin_close)
            return
        try:
            thread.run(self._consumer.close())
        except Closed:
            if self._thread is thread:
                raise  # else another thread's `close` was the faster
        self._release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def _release(self) -> None:
        with self._releasing:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.release()


class PullConsumer(Face):
    """Reads queues that the application names, from where it says, when it asks."""

    @described_as(pull.PullConsumer.__init__)
    def __init__(
        self,
        group: str | None = None,
        *,
        nameserver: Addresses | None = None,
        settings: ConsumerSettings | None = None,
    ) -> None:
        self._consumer = pull.PullConsumer(group, nameserver=nameserver, settings=settings)
        self._hosted = Hosted(self._consumer, "the consumer")

    @as_in(pull.PullConsumer.start)
    def start(self) -> None:
        self._hosted.start()

    @as_in(pull.PullConsumer.close)
    def close(self) -> None:
        self._hosted.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    @property
    def missing(self) -> tuple[MissingBroker, ...]:
        """Brokers that are away: what they store is not read, until they are back.

        A topic is read to its end only while there is none.
        """
        return self._consumer.missing

    @property
    def assignment(self) -> frozenset[MessageQueue]:
        """The queues that are read."""
        return self._consumer.assignment

    def position(self, queue: MessageQueue) -> int:
        """The offset that `poll` goes on from; -1: not before a `seek`, see `assign`.

        Raises InvalidArgument if it is not assigned.
        """
        return self._consumer.position(queue)

    @as_in(pull.PullConsumer.poll)
    def poll(self, *args: Any, **options: Any) -> list[Message]:
        took: dict[MessageQueue, int] = {}
        try:
            return self._hosted.run(self._consumer._poll(took, *args, **options))
        except BaseException:  # of a signal's handler: what was taken reaches nobody
            with suppress(DuemqError):
                self._hosted.run(self._consumer._give_back(took))
            raise

    queues = blocking(pull.PullConsumer.queues)
    assign = blocking(pull.PullConsumer.assign)
    seek = blocking(pull.PullConsumer.seek)
    pause = in_loop(pull.PullConsumer.pause)
    resume = in_loop(pull.PullConsumer.resume)
    commit = blocking(pull.PullConsumer.commit)
    committed = blocking(pull.PullConsumer.committed)
