"""The twin as tests see it, but for what waits: clock, groups, and a look at what is stored."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, TypeVar, Unpack, overload

from duemq.administering.pending_timers import shift_ms_of
from duemq.consumer.delivery.workers import (
    Callback,
    OnEither,
    OnMessage,
    OnMessages,
    cancelling,
)
from duemq.consumer.fetching.subscription import Topics
from duemq.consumer.settings import PushOptions
from duemq.descriptions import (
    HeldTimers,
    ResumePolicy,
    TimerCount,
    TimerDescription,
    TimerHold,
)
from duemq.errors import TopicExists
from duemq.message import Message
from duemq.outcomes import DeadLetter, RetryLater, errors_of, meant
from duemq.producing.cancels import Handle
from duemq.protocol import checks, due
from duemq.protocol.limits import QUEUES_MAX
from duemq.protocol.moments import Moment, epoch_ms
from duemq.protocol.names import dead_letter_topic
from duemq.protocol.retry_policy import Delay, ExponentialDelays, policy_of
from duemq.testing import waiting
from duemq.testing.asking import ShardFace, ShardQuestions
from duemq.testing.broker import MemoryBroker, Pending
from duemq.testing.groups import Delivery, TwinGroups
from duemq.tracing import processing

C = TypeVar("C")

log = logging.getLogger(__name__)

QUEUES = 4
DELIVERIES_MAX = 100_000
"""Of one `deliver`: callbacks that send to what they consume would never end it."""


class ClusterCore(ShardFace, ABC, Generic[C]):
    """What the blocking and the asyncio cluster have in common.  C: their push consumers."""

    def __init__(
        self,
        *,
        now: datetime | int | None = None,
        queues: int = QUEUES,
        raise_errors: bool = False,
    ) -> None:
        """`now`: where the clock stands: an aware datetime or ms since the epoch; None: the time.

        `queues`: of topics that are made on first use.  `raise_errors`: `deliver` and `advance`
        raise what a callback raised, RetryLater and DeadLetter excepted, once the message has been
        sent back; else it is logged, as consumers do.
        """
        checks.whole("queues", queues, 1, QUEUES_MAX)
        now_ms = time.time_ns() // 1_000_000 if now is None else epoch_ms(now, 0, "now")
        self._broker = MemoryBroker(now_ms, queues)
        self._shard = ShardQuestions(self._broker)
        self._groups = TwinGroups(self._broker)
        # Guards both: producers may be used from many threads.
        self._lock = threading.RLock()
        self._raise_errors = raise_errors
        self._delivering = False

    @property
    def now_ms(self) -> int:
        """The clock, in ms since the epoch; only `advance` moves it."""
        return self._broker.now_ms

    # ── before ───────────────────────────────────────────────────────────────────────

    def create_topic(self, name: str, *, queues: int = QUEUES) -> None:
        """As `Admin.create_topic`; sends make topics, too.  Raises InvalidArgument, TopicExists."""
        with self._lock:
            if self._broker.has_topic(name):
                raise TopicExists(f"topic {name!r} exists", field="name", value=name)
            self._broker.create_topic(name, queues)

    def delete_topic(self, name: str) -> None:
        """As `Admin.delete_topic`.  Raises TopicNotFound.

        One that is made anew is another topic: groups begin in it as in any that is new to them.
        """
        with self._lock:
            self._broker.delete_topic(name)
            self._groups.forget_topic(name)

    def put_group(
        self,
        name: str,
        *,
        retries_max: int | None = None,
        retry_delays: Sequence[Delay] | str | None = None,
        exponential: ExponentialDelays | tuple[Delay, float, Delay] | None = None,
    ) -> None:
        """As `Admin.put_group`: when what the group sends back comes again."""
        self._groups.put(name, policy_of(retries_max, retry_delays, exponential))

    @overload
    def push_consumer(
        self,
        group: str,
        topics: Topics,
        callback: OnMessage,
        *,
        batch: Literal[False] = False,
        **options: Unpack[PushOptions],
    ) -> C: ...
    @overload
    def push_consumer(
        self,
        group: str,
        topics: Topics,
        callback: OnMessages,
        *,
        batch: Literal[True],
        **options: Unpack[PushOptions],
    ) -> C: ...
    @overload
    def push_consumer(
        self,
        group: str,
        topics: Topics,
        callback: OnEither,
        *,
        batch: bool,
        **options: Unpack[PushOptions],
    ) -> C: ...
    def push_consumer(
        self,
        group: str,
        topics: Topics,
        callback: Callback,
        *,
        batch: bool = False,
        **options: Unpack[PushOptions],
    ) -> C:
        """A PushConsumer with the arguments of the real one.  Raises InvalidArgument.

        It takes part from its `start` (or `with`) to its `close`.
        """
        return self._new_consumer(group, topics, callback, batch=batch, **options)

    @abstractmethod
    def _new_consumer(self, *args: Any, **options: Any) -> C: ...

    # ── after ────────────────────────────────────────────────────────────────────────

    def messages(self, topic: str) -> list[Message]:
        """All that was stored in a topic, in that order, consumed or not."""
        return self._broker.messages(topic)

    def dead_letters(self, group: str) -> list[Message]:
        """What a group has given up; `Message.retry` says where it came from and why."""
        return self._broker.messages(dead_letter_topic(group))

    def pending(self) -> list[Pending]:
        """What waits for its time, delayed or for a retry, in the order of due times."""
        return self._broker.pending()

    def count_timers(self, topic: str | None = None) -> list[TimerCount]:
        """As `Admin.count_timers`; retries are counted at the topic that they go to."""
        return waiting.count(self._broker, topic)

    def get_timers(self, handles: Sequence[Handle]) -> list[TimerDescription]:
        """As `Admin.get_timers`.  Raises InvalidArgument."""
        return waiting.get(self._broker, handles)

    def list_timers(
        self,
        topic: str,
        *,
        key_prefix: str = "",
        since: Moment | None = None,
        until: Moment | None = None,
        limit: int | None = None,
        bodies: bool = False,
    ) -> Iterator[TimerDescription]:
        """As `Admin.list_timers`.  Raises InvalidArgument."""
        which = key_prefix, since, until, limit, bodies
        return waiting.pending(self._broker, topic, *which)

    def hold_timers(self, topic: str, *, key_prefix: str = "", dry_run: bool = False) -> HeldTimers:
        """As `Admin.hold_timers`.  Raises InvalidArgument."""
        return waiting.hold(self._broker, topic, key_prefix, dry_run=dry_run)

    def resume_timers(
        self,
        topic: str,
        *,
        key_prefix: str = "",
        policy: str = ResumePolicy.ALL,
        older_than: Delay | None = None,
        dry_run: bool = False,
    ) -> HeldTimers:
        """As `Admin.resume_timers`; what goes is stored, and delivered by `deliver`."""
        return waiting.resume(self._broker, topic, key_prefix, policy, older_than, dry_run=dry_run)

    def timer_holds(self) -> list[TimerHold]:
        """As `Admin.timer_holds`."""
        return waiting.holds(self._broker)

    def cancel_pending(
        self,
        topic: str,
        *,
        key_prefix: str = "",
        since: Moment | None = None,
        until: Moment | None = None,
        dry_run: bool = False,
    ) -> int:
        """As `Admin.cancel_pending`.  Raises InvalidArgument."""
        which = key_prefix, since, until
        return waiting.change(self._broker, topic, *which, dry_run=dry_run)

    def shift_pending(
        self,
        topic: str,
        by: float | timedelta | str,
        *,
        key_prefix: str = "",
        since: Moment | None = None,
        until: Moment | None = None,
        dry_run: bool = False,
    ) -> int:
        """As `Admin.shift_pending`.  Raises InvalidArgument."""
        which = key_prefix, since, until
        by_ms = shift_ms_of(by)
        return waiting.change(self._broker, topic, *which, by_ms, dry_run=dry_run)

    def move_pending(
        self,
        topic: str,
        to_topic: str,
        *,
        since: Moment | None = None,
        until: Moment | None = None,
        dry_run: bool = False,
    ) -> int:
        """As `Admin.move_pending`.  Raises InvalidArgument, TopicNotFound."""
        which = "", since, until, None, to_topic
        return waiting.change(self._broker, topic, *which, dry_run=dry_run)

    def lag(self, group: str) -> int:
        """Messages that are stored and that the group is not done with, suspended ones among them.

        Retries that are not due yet are not among them: see `pending`.
        """
        return self._groups.lag(group)

    # ── delivering ───────────────────────────────────────────────────────────────────

    @contextmanager
    def _round(self) -> Iterator[None]:
        if self._delivering:
            raise RuntimeError("a callback cannot deliver: send, and let the test deliver")
        self._delivering = True
        try:
            self._broker.tell()
            yield
        finally:
            self._delivering = False

    def _next(self, delivered: int) -> Delivery | None:
        if delivered >= DELIVERIES_MAX:
            raise RuntimeError(f"{delivered} messages and no end: do callbacks feed themselves?")
        with self._lock:
            return self._groups.next_delivery()

    @contextmanager
    def _calling(self, delivery: Delivery) -> Iterator[None]:
        """Around a callback: hears how it ends."""
        failure: BaseException | None = None
        member = delivery.member
        try:
            with processing.process(
                delivery.messages, group=member.group, client_id=member.name, blame=errors_of
            ):
                yield
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelling()():
                raise  # as what is a test framework's own
            failure = error
        with self._lock:
            self._groups.finish(delivery, failure)
        if failure is None:
            return
        if not isinstance(meant(failure, len(delivery.messages)), RetryLater | DeadLetter):
            if self._raise_errors:
                raise failure
            log.warning("the callback failed for %r", delivery.messages[0], exc_info=failure)

    def _step(self, until_ms: int) -> bool:
        """Moves the clock to what is next, or to `until_ms`: then False."""
        with self._lock:
            times = (self._broker.next_due(), self._groups.next_try())
            next_ms = min((ms for ms in times if ms is not None), default=until_ms + 1)
            self._broker.now_ms = max(self._broker.now_ms, min(next_ms, until_ms))
            self._broker.fire()
            return next_ms <= until_ms

    def _end_of(self, by: float | timedelta | str) -> int:
        return self._broker.now_ms + due.delay_ms(by, "by")
