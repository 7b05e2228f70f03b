"""The consumers for programs without an event loop: the asyncio ones on the thread "duemq-io".

Callbacks of a push consumer run in worker threads of their own, never in "duemq-io".
"""

import threading
from collections.abc import Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from duemq.consumer import pull, push
from duemq.consumer.delivery.workers import Callback, OnEither, OnMessage, OnMessages
from duemq.consumer.fetching.subscription import Topics
from duemq.consumer.pull import Place
from duemq.consumer.settings import ConsumerSettings, Order, StartFrom
from duemq.errors import Closed, MissingBroker
from duemq.message import Message
from duemq.protocol.balance import MessageQueue
from duemq.protocol.sql import Sql
from duemq.transport.cluster_client import Addresses
from duemq.transport.loop_thread import Hosted, LoopThread

T = TypeVar("T")


class PushConsumer:
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
        order: Order | None = None,
        broadcast: bool = False,
        member_name: str | None = None,
        start_from: StartFrom | None = None,
        threads: int | None = None,
        nameserver: Addresses | None = None,
        settings: ConsumerSettings | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: OnMessages,
        *,
        batch: Literal[True],
        order: Order | None = None,
        broadcast: bool = False,
        member_name: str | None = None,
        start_from: StartFrom | None = None,
        threads: int | None = None,
        nameserver: Addresses | None = None,
        settings: ConsumerSettings | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: OnEither,
        *,
        batch: bool,
        order: Order | None = None,
        broadcast: bool = False,
        member_name: str | None = None,
        start_from: StartFrom | None = None,
        threads: int | None = None,
        nameserver: Addresses | None = None,
        settings: ConsumerSettings | None = None,
    ) -> None: ...
    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: Callback,
        *,
        batch: bool = False,
        order: Order | None = None,
        broadcast: bool = False,
        member_name: str | None = None,
        start_from: StartFrom | None = None,
        threads: int | None = None,
        nameserver: Addresses | None = None,
        settings: ConsumerSettings | None = None,
    ) -> None:
        """`topics`: a name, several, or {name: filter}; a filter is tags like "a || b", or Sql.

        The callback runs in up to `threads` threads at a time.

        `batch`: it gets lists of one queue's messages.  `order`: "queue", one message of a queue at
        a time, or "key", one of an ordering key at a time.  `broadcast`: this consumer gets all
        messages, whatever others of the group get; how far it is stands in a file here.
        `member_name`: a name that is this consumer's alone, for as long as it runs; who comes back
        under it within `session_timeout_s` goes on with the same queues, and an older process of
        that name ends with FencedMember.  (Broadcast: names the file; by default the host's name.)
        `start_from`: where the group begins in queues that it has no offset for: "earliest",
        "latest", an aware datetime, ms since the epoch, or "-1h".  `start_from` and `threads`
        override `settings`.  Raises InvalidArgument.
        """
        self._consumer = push.PushConsumer(
            group,
            topics,
            callback,
            batch=batch,
            order=order,
            broadcast=broadcast,
            member_name=member_name,
            start_from=start_from,
            threads=threads,
            nameserver=nameserver,
            settings=settings,
        )
        self._thread: LoopThread | None = None
        self._releasing = threading.Lock()  # guards _thread: `run` and `close` both end it
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

    def start(self) -> None:
        """Joins the group; returns when the group has answered.

        Raises Unavailable or Timeout when it cannot be reached in time, Rejected when it refuses,
        FencedMember when a newer process has this `member_name`.
        """
        if self._started:
            raise Closed("a consumer is started once")
        self._started = True
        self._thread = LoopThread.acquire()
        try:
            self._thread.run(self._consumer.start())
        except BaseException:
            try:
                self.close()  # Ctrl-C: the group may have this member by now
            finally:
                self._release()
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

    def close(self) -> None:
        """Stops, waits for running callbacks, commits, leaves the group.  Idempotent.

        What just failed is sent back first.  With a `member_name` the queues are not given to
        others before `session_timeout_s` is over.  From within the callback it only begins to:
        `run` returns when all is done.
        """
        thread = self._thread
        if thread is None:
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

    def __enter__(self) -> "PushConsumer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _release(self) -> None:
        with self._releasing:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.release()


class PullConsumer:
    """Reads queues that the application names, from where it says, when it asks."""

    def __init__(
        self,
        group: str | None = None,
        *,
        nameserver: Addresses | None = None,
        settings: ConsumerSettings | None = None,
    ) -> None:
        """`group`: whose offsets to begin from and to commit to; None: no offsets are kept.

        Raises InvalidArgument.
        """
        self._consumer = pull.PullConsumer(group, nameserver=nameserver, settings=settings)
        self._hosted: Hosted | None = None

    def start(self) -> None:
        """Connects.  Raises Unavailable if no nameserver answers in time, Closed if repeated."""
        if self._hosted is not None:
            raise Closed("a consumer is started once")
        self._hosted = Hosted(self._consumer, "the consumer")

    def close(self) -> None:
        """Ends; commits nothing by itself.  Idempotent."""
        if self._hosted is not None:
            self._hosted.close()

    def __enter__(self) -> "PullConsumer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def missing(self) -> tuple[MissingBroker, ...]:
        """Brokers that are away: what they store is not read, until they are back.

        A topic is read to its end only while there is none.
        """
        return self._consumer.missing

    def queues(self, topic: str) -> list[MessageQueue]:
        """Answers the topic's queues, sorted, without those of `missing`.  Raises TopicNotFound."""
        return self._run(self._consumer.queues(topic))

    def assign(
        self,
        queues: str | Iterable[MessageQueue],
        *,
        filter: str | Sql = "",
        start_from: StartFrom | None = None,
    ) -> None:
        """Reads these queues, or all of a topic, in place of those before.

        Each begins at the group's committed offset; without one, at `start_from` (by default the
        settings'): see StartFrom.  `filter`: tags, as "a || b", or Sql.  Raises InvalidArgument,
        TopicNotFound, QueueNotFound, Unavailable.
        """
        self._run(self._consumer.assign(queues, filter=filter, start_from=start_from))

    @property
    def assignment(self) -> frozenset[MessageQueue]:
        """The queues that are read."""
        return self._consumer.assignment

    def seek(self, queue: MessageQueue, to: Place) -> None:
        """Goes on at an offset, an end of the queue, or a time.

        Raises InvalidArgument.  An offset that the broker does not have is told by `poll`.
        """
        self._run(self._consumer.seek(queue, to))

    def position(self, queue: MessageQueue) -> int:
        """The offset that `poll` goes on from.  Raises InvalidArgument if it is not assigned."""
        return self._consumer.position(queue)

    def pause(self, *queues: MessageQueue) -> None:
        """`poll` leaves these queues out until `resume`."""
        self._run(_later(self._consumer.pause, *queues))

    def resume(self, *queues: MessageQueue) -> None:
        """Takes `pause` back."""
        self._run(_later(self._consumer.resume, *queues))

    def poll(self, timeout_s: float = 1.0, messages_max: int = 500) -> list[Message]:
        """Answers what has come, at once if there is any; an empty list after `timeout_s`.

        Messages of one queue come in its order.  Raises what a broker said about a queue, once;
        after OffsetOutOfRange, `seek` to go on with that queue.  Raises Closed, InvalidArgument.
        """
        return self._run(self._consumer.poll(timeout_s, messages_max))

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Stores the positions of all assigned queues, or those given, for the group.

        Nothing fences this consumer out: what it says goes, also after a reset of the offsets.
        Raises InvalidArgument without a group or for what is no offset, and the first error of a
        broker.
        """
        self._run(self._consumer.commit(offsets))

    def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset in a queue; None: it has none."""
        return self._run(self._consumer.committed(queue))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._hosted is None:
            work.close()
            raise Closed("the consumer is not started: use `with` or `start()`")
        return self._hosted.run(work)


async def _later(method: Any, *queues: MessageQueue) -> None:
    """Runs a method in the loop that owns the consumer's state."""
    method(*queues)
