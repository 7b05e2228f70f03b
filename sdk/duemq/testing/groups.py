"""Which message a group is given next in the twin, and what becomes of one that failed.  Pure.

Concurrent consumption: a message is done, or sent back, and the queue goes on behind it.  In order
(and broadcast) what failed waits in a lane, and with it what must not overtake it: the whole queue,
or its ordering key.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from duemq.consumer.fetching.subscription import Filter
from duemq.consumer.settings import ConsumerSettings, Order, StartFrom, resolved, start_ms
from duemq.errors import Closed, InvalidArgument
from duemq.message import Message
from duemq.outcomes import Failed, Outcome, failures_of, outcome_of
from duemq.protocol import checks
from duemq.protocol.balance import MessageQueue, allocate, strategy_named
from duemq.protocol.names import (
    check_own_group,
    check_topic,
    dead_letter_topic,
    retry_topic,
)
from duemq.protocol.retry_policy import DEFAULT_POLICY, RetryPolicy
from duemq.testing.broker import MemoryBroker
from duemq.testing.logs import StoredEntry
from duemq.v1.message_pb2 import QueueRef, Record

log = logging.getLogger(__name__)


@dataclass
class RetryLane:
    """Messages that wait for the first of them to be tried again."""

    waiting: deque[StoredEntry]
    tries: int = 0
    """Of the first, failed."""
    together: int = 1
    """So many failed as one list."""
    until_ms: int = 0
    failed: Counter[int] = field(default_factory=Counter)
    """How often each has, by offset."""


@dataclass
class TwinProgress:
    """How far a group, or a member of a broadcast group, is."""

    next: dict[MessageQueue, int] = field(default_factory=dict)
    """Queues that are not in it begin at 0."""
    lanes: dict[MessageQueue, dict[Hashable, RetryLane]] = field(default_factory=dict)
    topics: set[str] = field(default_factory=set)
    """All that were ever subscribed to."""
    holders: dict[MessageQueue, MemoryMember] = field(default_factory=dict)
    """Who had each queue last."""


@dataclass(eq=False)
class MemoryMember:
    """A consumer."""

    group: str
    filters: Mapping[str, Filter]
    callback: Callable[[Any], Any]
    settings: ConsumerSettings
    batch: bool
    order: Order | None
    broadcast: bool
    name: str
    joined: bool = False
    """And may have left since, or before."""
    progress: TwinProgress = field(default_factory=TwinProgress)

    def lane_of(self, message: Message) -> Hashable | None:
        """What waits for one another; None: nothing does."""
        return "" if self.order == "queue" else message.ordering_key if self.order else None


@dataclass
class Delivery:
    """Messages that a callback is to be given now."""

    member: MemoryMember
    queue: MessageQueue
    entries: list[StoredEntry]
    messages: list[Message]
    """Copies: callbacks may keep them."""
    lane: RetryLane | None

    def call(self) -> Any:
        """Calls the callback; what it sets in its context is not for the next."""
        given = list(self.messages) if self.member.batch else self.messages[0]
        return copy_context().run(self.member.callback, given)


class TwinGroups:
    """All groups of a twin."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._members: list[MemoryMember] = []
        self._progress: dict[tuple[str, str], TwinProgress] = {}  # (group, "" or broadcast member)
        self._policies: dict[str, RetryPolicy] = {}
        self._numbers = count(1)

    # ── members ──────────────────────────────────────────────────────────────────────

    def put(self, group: str, policy: RetryPolicy) -> None:
        """Sets when what the group sends back comes again."""
        check_own_group(group)
        policy.check()
        self._policies[group] = policy.over(DEFAULT_POLICY)

    def join(self, member: MemoryMember) -> None:
        """Raises Closed the second time, InvalidArgument as the group's coordinator would."""
        if member.joined:
            raise Closed("a consumer is started once")
        check_own_group(member.group)
        for topic, wanted in member.filters.items():
            check_topic(topic)
            if wanted.filter_type:
                raise InvalidArgument(
                    f"topics: the SQL filter of {topic!r} needs a broker; duemq.testing has none",
                    field="topics",
                    value=wanted.text,
                    limit="tags",
                )
        for other in [each for each in self._members if each.group == member.group]:
            if not (other.broadcast or member.broadcast):
                _check_same(other.filters, member.filters)
            if (other.name, other.broadcast) == (member.name, member.broadcast):
                if member.broadcast:
                    raise checks.wrong("member_name", member.name, "one that no other has now")
                self.leave(other)
        member.name = member.name or self._name_for(member)
        whose = (member.group, member.name if member.broadcast else "")
        member.progress = self._progress.setdefault(whose, member.progress)
        start_from, new = member.settings.start_from, set(member.filters)
        if member.broadcast or start_from == "latest":  # what came meanwhile is not left out
            new -= member.progress.topics
        member.progress.topics |= set(member.filters)
        if not member.broadcast:
            member.progress.topics.add(retry_topic(member.group))
        for topic in new:
            for queue in self._broker.queues_of(topic):
                if queue not in member.progress.next:
                    member.progress.next[queue] = self._start(queue, start_from)
        member.joined = True
        self._members.append(member)

    def _name_for(self, member: MemoryMember) -> str:
        """Its own; in broadcast that of a host, which goes on where that was."""
        if not member.broadcast:
            return f"member-{next(self._numbers):04d}"
        taken = {each.name for each in self._members if each.group == member.group}
        return next(host for n in count(1) if (host := f"host-{n}") not in taken)

    def forget_topic(self, topic: str) -> None:
        """It was deleted: no group is anywhere in it any more."""
        for progress in self._progress.values():
            for kept in (progress.next, progress.lanes):
                for queue in [queue for queue in kept if queue.topic == topic]:
                    del kept[queue]

    def leave(self, member: MemoryMember) -> None:
        """Its queues are the others' from now on."""
        member.joined = True
        if member in self._members:
            self._members.remove(member)

    def queues_of(self, member: MemoryMember) -> list[MessageQueue]:
        """The queues that a member consumes now."""
        if member not in self._members:
            return []
        topics = list(member.filters)
        if member.broadcast:
            return [queue for topic in topics for queue in self._broker.queues_of(topic)]
        topics.append(retry_topic(member.group))
        queues = [queue for topic in topics for queue in self._broker.queues_of(topic)]
        peers = [m for m in self._members if m.group == member.group and not m.broadcast]
        owners = allocate(
            strategy_named(member.settings.strategy), queues, {m.name: topics for m in peers}
        )
        return [queue for queue in queues if owners.get(queue) == member.name]

    def lag(self, group: str) -> int:
        """Messages that are stored and not finished, waiting ones among them."""
        shares = [progress for (of, _), progress in self._progress.items() if of == group]
        return sum(self._behind(progress) for progress in shares)

    def _behind(self, progress: TwinProgress) -> int:
        queues = [q for topic in progress.topics for q in self._broker.queues_of(topic)]
        behind = sum(len(self._broker.log(q)) - progress.next.get(q, 0) for q in queues)
        held = [lane for lanes in progress.lanes.values() for lane in lanes.values()]
        return behind + sum(len(lane.waiting) for lane in held)

    def _start(self, queue: MessageQueue, start_from: StartFrom) -> int:
        stored = self._broker.log(queue)
        start_from = resolved(start_from, self._broker.now_ms)
        if isinstance(start_from, str):
            return 0 if start_from == "earliest" else len(stored)
        from_ms = start_ms(start_from)
        return sum(entry.message.store_ms < from_ms for entry in stored)

    # ── what comes next ──────────────────────────────────────────────────────────────

    def next_delivery(self) -> Delivery | None:
        """Of all that may be processed now, what was stored first."""
        found = [
            delivery
            for member in self._members
            for queue in self.queues_of(member)
            for delivery in self._of_queue(member, queue)
        ]
        return min(found, key=lambda each: each.entries[0].number, default=None)

    def next_try(self) -> int | None:
        """When the next suspended message may be tried again."""
        times = [
            lane.until_ms
            for member in self._members
            for queue in self.queues_of(member)
            for lane in member.progress.lanes.get(queue, {}).values()
            if lane.until_ms > self._broker.now_ms
        ]
        return min(times, default=None)

    def _of_queue(self, member: MemoryMember, queue: MessageQueue) -> Iterator[Delivery]:
        size = member.settings.batch_messages_max if member.batch else 1
        progress = member.progress
        lanes = progress.lanes.setdefault(queue, {})
        if progress.holders.get(queue) is not member:  # begins at what was committed, and anew
            progress.holders[queue] = member
            waiting = [each.message.offset for lane in lanes.values() for each in lane.waiting]
            progress.next[queue] = min([progress.next.get(queue, 0), *waiting])
            lanes.clear()
        for lane in lanes.values():
            if lane.until_ms <= self._broker.now_ms:
                entries = list(lane.waiting)[: lane.together if lane.tries else size]
                yield _delivery(member, queue, entries, lane)
        if entries := self._fresh(member, queue, lanes, size):
            yield _delivery(member, queue, entries, None)

    def _fresh(
        self, member: MemoryMember, queue: MessageQueue, lanes: dict[Hashable, RetryLane], size: int
    ) -> list[StoredEntry]:
        """Messages of one lane that were never tried; passes over what is not wanted."""
        stored, entries = self._broker.log(queue), list[StoredEntry]()
        wanted = member.filters.get(queue.topic)
        at = member.progress.next.setdefault(queue, 0)
        while at < len(stored) and len(entries) < size:
            entry = stored[at]
            key = member.lane_of(entry.message)
            if wanted is None or wanted.takes(entry.message.tag):
                if key is not None and key in lanes and not entries:
                    lanes[key].waiting.append(entry)
                elif entries and key != member.lane_of(entries[0].message):
                    break
                else:
                    entries.append(entry)
            at += 1
            if not entries:
                member.progress.next[queue] = at
        return entries

    # ── what became of it ────────────────────────────────────────────────────────────

    def finish(self, delivery: Delivery, error: BaseException | None) -> None:
        """The callback has returned, or raised; of a topic that it deleted, nothing is left."""
        member, queue = delivery.member, delivery.queue
        if not self._broker.holds(queue, delivery.entries[0]):
            return
        if delivery.lane is None:
            member.progress.next[queue] = delivery.entries[-1].message.offset + 1
        failed = failures_of(error, delivery.messages) if error is not None else []
        if member.order is None and not member.broadcast:
            for each in failed:
                for message in _of(each, delivery.messages):
                    self._send_back(member.group, message, outcome_of(each.error))
        elif member.lane_of(delivery.messages[0]) is None:
            self._finish_free(delivery, failed)
        else:
            self._finish_lane(delivery, failed)

    def _finish_free(self, delivery: Delivery, failed: Sequence[Failed]) -> None:
        """Messages that wait for nobody: what failed together has a lane of its own."""
        lanes, before = delivery.member.progress.lanes[delivery.queue], delivery.lane
        lanes.pop(_free_key(delivery.entries), None)
        for each in failed:
            entries = _of(each, delivery.entries)
            lane = RetryLane(deque(entries), before.tries if before else 0)
            lane.failed.update(before.failed if before else ())
            self._suspend(delivery.member, lane, each, delivery.messages)
            if lane.waiting:
                lanes[_free_key(entries)] = lane

    def _finish_lane(self, delivery: Delivery, failed: Sequence[Failed]) -> None:
        """Messages in order: what failed first, and all behind it, waits."""
        member, entries = delivery.member, delivery.entries
        lanes = member.progress.lanes[delivery.queue]
        key = member.lane_of(delivery.messages[0])
        lane = lanes.setdefault(key, delivery.lane or RetryLane(deque(entries)))
        for _ in range(failed[0].index if failed else len(entries)):
            lane.waiting.popleft()
            lane.tries = 0
        if failed:
            self._suspend(member, lane, failed[0], delivery.messages)
        if not lane.waiting:
            del lanes[key]

    def _suspend(
        self, member: MemoryMember, lane: RetryLane, failed: Failed, messages: Sequence[Message]
    ) -> None:
        """The first of a lane failed, as one: they wait, or are passed."""
        lane.tries += 1
        lane.together = failed.count
        first, outcome, settings = _of(failed, messages), outcome_of(failed.error), member.settings
        if not outcome.dead_letter and lane.tries <= settings.retries_in_order_max:
            chosen = outcome.delay_ms
            wait_ms = round(settings.suspend_s * 1000) if chosen is None else chosen
            lane.until_ms = self._broker.now_ms + wait_ms
            lane.failed.update(message.offset for message in first)
            return
        for message in first:
            lane.waiting.popleft()
            if member.broadcast:
                log.error("group %s: skipped %r: %s", member.group, message, outcome.error)
            else:
                dead = Outcome(outcome.error, dead_letter=True)
                self._send_back(member.group, message, dead)
        lane.tries = lane.until_ms = 0

    def _send_back(self, group: str, message: Message, outcome: Outcome) -> None:
        policy, now_ms = self._policies.get(group, DEFAULT_POLICY), self._broker.now_ms
        record = Record()
        record.CopyFrom(message._record)
        record.ClearField("due_ms")
        record.attempt += 1
        story = record.retry
        source = QueueRef(topic=message.stored_topic, broker=message.broker, queue_id=message.queue)
        if source.topic != retry_topic(group):
            story.Clear()
            story.origin.CopyFrom(source)
            story.origin_offset, story.first_failed_ms = message.offset, now_ms
        story.source.CopyFrom(source)
        story.source_offset, story.last_failed_ms = message.offset, now_ms
        story.group, story.error = group, outcome.error
        if outcome.dead_letter or record.attempt > (policy.retries_max or 0):
            self._broker.append(dead_letter_topic(group), 0, record)
            return
        chosen = outcome.delay_ms
        after_ms = policy.delay_ms(record.attempt) if chosen is None else chosen
        self._broker.schedule(now_ms + after_ms, retry_topic(group), 0, record)
        self._broker.fire()


def _delivery(
    member: MemoryMember, queue: MessageQueue, entries: list[StoredEntry], lane: RetryLane | None
) -> Delivery:
    messages = []
    for _, stored in entries:
        record = Record()
        record.CopyFrom(stored._record)
        messages.append(Message(record, stored._origin, stored.offset, stored.store_ms))
        for _ in range(lane.failed[stored.offset] if lane else 0):
            messages[-1].again()
    return Delivery(member, queue, entries, messages, lane)


def _of(failed: Failed, given: Sequence[Any]) -> Sequence[Any]:
    return given[failed.index : failed.index + failed.count]


def _free_key(entries: Sequence[StoredEntry]) -> Hashable:
    return (entries[0].message.offset,)


def _check_same(there: Mapping[str, Filter], new: Mapping[str, Filter]) -> None:
    for topic in sorted({*there, *new}):
        if there.get(topic) != new.get(topic):
            raise InvalidArgument(
                f"subscriptions: the group's members read topic {topic!r} differently",
                field="subscriptions",
                value=topic,
                limit="the same topics and filters for all members",
            )
