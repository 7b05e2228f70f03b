"""The pump: gives waiting batches a queue and numbers, and the links frames to carry.

A batch with an ordering key, or a due time and a queue, has its queue from the start.  The others
wait in their topic's pool and are taken by whichever broker's link has room, so that each broker
gets what it can digest; brokers take turns when several have room, and the queues of a broker
take turns too.  A batch is bound to its lane once it is numbered: until its outcome is known it is
sent nowhere else.

The pump runs to its end whenever something may have changed: a batch began, an answer came, a link
came up, the routes changed, a pause or a deadline passed.  Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict, deque
from typing import Any

from duemq.errors import (
    Closed,
    DuemqError,
    Fenced,
    FencedProducer,
    Internal,
    OutOfSequence,
    QueueNotFound,
    Timeout,
    TopicNotFound,
)
from duemq.producing.batch import Batch
from duemq.producing.broker_health import Health
from duemq.producing.broker_link import Frame, Link
from duemq.producing.intake import queue_for
from duemq.producing.losses import Losses
from duemq.producing.outbox import Outbox, Target
from duemq.producing.sequence_lane import Lane
from duemq.settings import ProducerSettings
from duemq.tracing import spans
from duemq.transport import status
from duemq.transport.cluster_client import Client
from duemq.transport.retrying import Backoff

# While a frame is on its way to a broker, a further one to it leaves only when HOLD_BYTES wait:
# below that, to wait for an answer makes fuller frames and less work for all.
HOLD_BYTES = 32 * 1024
# For the answer of another broker it waits as well, but no longer than this.
HOLD_S = 0.002
# After a broker refused for a reason of its own (overloaded, read-only).
REFUSED_S_MIN = 0.05
REFUSED_S_MAX = 2.0
ANY_QUEUE = -1


class Sender:
    """One producer's."""

    def __init__(
        self, client: Client, settings: ProducerSettings, outbox: Outbox, losses: Losses
    ) -> None:
        self.producer_id = secrets.randbits(63)
        self.targets: dict[str, Target] = {}
        """By topic.  Added to by callers' threads, read here."""
        self._client = client
        self._settings = settings
        self._outbox = outbox
        self._losses = losses
        self._health = Health()
        self._links: dict[str, Link] = {}
        self._lanes: dict[tuple[str, str, int, bool], Lane] = {}
        # Lanes with something waiting, by broker, in the order of their turns.
        self._busy: defaultdict[str, dict[Lane, None]] = defaultdict(dict)
        self._pools: dict[str, deque[Batch]] = {}
        self._served: dict[str, dict[str, int]] = {}
        self._closed = False
        self._finding: dict[str, tuple[Target, asyncio.Task[None]]] = {}
        self.early: deque[Batch] = deque()
        """Batches whose topic is not found yet, in the order they began."""
        self.open: deque[Batch] = deque()
        """Batches taken in and not done, in the order they began; done ones among them."""
        # Producers that send little begin at different brokers and queues, each by its own lot.
        lot = self.producer_id
        self._queue_turns: defaultdict[tuple[str, str], int] = defaultdict(lambda: lot >> 32)
        self._broker_turn = lot & 0xFFFF_FFFF
        self._refusals: dict[str, Backoff] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._holding: asyncio.TimerHandle | None = None
        self._hold_over = False
        self._loop = asyncio.get_running_loop()
        client.on_routes_changed(self._routes_changed)

    async def open_target(self, topic: str) -> Target:
        """Finds the topic, made if need be, and connects to its brokers.

        Raises TopicNotFound, InvalidArgument, Unavailable.
        """
        settings = self._settings
        route = await self._client.topic_route(
            topic, create=settings.create_topics, timeout_s=settings.send_timeout_s
        )
        target = self.targets.get(topic)
        if target is None:
            target = self._found(topic)
        served = [each.broker for each in route.brokers if each.writable]
        first = self._broker_turn % len(served) if served else 0
        for broker in served[first:] + served[:first]:
            self._link(broker).want()
        return target

    def early_target(self, topic: str) -> Target:
        """For a topic that is not found yet: its messages wait until it is, or fail as it does."""
        finding = self._finding.get(topic)
        if finding is None:
            task = self._loop.create_task(self._find(topic), name=f"find {topic}")
            finding = (Target(topic, (), spans.traced(topic), found=False), task)
            self._finding[topic] = finding
        return finding[0]

    async def _find(self, topic: str) -> None:
        try:
            await self.open_target(topic)
        except Exception as error:
            self._finding.pop(topic, None)
            cause = error if isinstance(error, DuemqError) else Internal(f"{topic!r}: {error!r}")
            for batch in self._take_early(topic):
                self._fail(batch, cause)

    def _found(self, topic: str) -> Target:
        target, _ = self._finding.pop(topic, (Target(topic, (), spans.traced(topic)), None))
        target.queues, target.found = self._client.routes.keyed(topic), True
        self.targets[topic] = target
        now = time.monotonic()
        for batch in self._take_early(topic):
            key, _ = batch.way
            if isinstance(key, str):
                try:
                    batch.queue = queue_for(target, key)
                except TopicNotFound as error:
                    self._fail(batch, error)
                    continue
            self._take(batch, now)
        self.pump()
        return target

    def _take_early(self, topic: str) -> list[Batch]:
        taken = [batch for batch in self.early if batch.topic == topic]
        left = [batch for batch in self.early if batch.topic != topic]
        self.early.clear()
        self.early.extend(left)
        return taken

    # ── life ─────────────────────────────────────────────────────────────────────────

    async def flush(self, timeout_s: float) -> None:
        """Waits until all that was accepted before is answered, one way or the other.

        Raises Timeout.
        """
        self.pump()
        pending = [batch for batch in (*self.early, *self.open) if not batch.done]
        try:
            async with asyncio.timeout(timeout_s):
                for batch in pending:
                    await batch.until_done()
        except TimeoutError:
            left = sum(batch.count for batch in pending if not batch.done)
            raise Timeout(f"{left} messages not answered within {timeout_s} s") from None

    async def close(self) -> None:
        """Ends all links; what is not done fails with Closed."""
        self._outbox.close()
        self._closed = True
        self._client.off_routes_changed(self._routes_changed)
        for timer in (self._timer, self._holding):
            if timer is not None:
                timer.cancel()
        for _, task in self._finding.values():
            task.cancel()
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._take_in(time.monotonic())
        for batch in (*self.early, *self.open):
            if not batch.done:
                outcome = "its outcome is unknown" if batch.in_flight else "it was not sent"
                self._fail(batch, Closed(f"the producer was closed before the answer; {outcome}"))
        self.early.clear()
        self.open.clear()

    # ── the pump ─────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Sends what can be sent now."""
        if self._closed:
            return
        now = time.monotonic()
        self._take_in(now)
        self._expire(now)
        for link in self._links.values():
            link.repeat(now)
        if self._pools or any(self._busy.values()):
            self._fill_links(now)
        self._set_timer()

    def _fill_links(self, now: float) -> None:
        for name in self._wanted_brokers():
            self._link(name).want()
        names = sorted(name for name, link in self._links.items() if link.ready(now))
        start = self._broker_turn % len(names) if names else 0
        for name in names[start:] + names[:start]:
            link = self._links[name]
            while link.ready(now) and not self._held(link, now):
                frame = self._frame_for(link, now)
                if frame is None:
                    break
                link.put(frame)

    def _take_in(self, now: float) -> None:
        for batch in self._outbox.take_arrivals():
            if batch.topic in self._finding:
                self.early.append(batch)
            else:
                self._take(batch, now)

    def _take(self, batch: Batch, now: float) -> None:
        batch.deadline = now + self._settings.send_timeout_s
        self.open.append(batch)
        if batch.queue is None:
            self._pools.setdefault(batch.topic, deque()).append(batch)
        else:
            queue = batch.queue
            self._wait_in(self._lane(queue.broker, batch, queue.queue_id), batch)

    def _wait_in(self, lane: Lane, batch: Batch) -> None:
        lane.waiting.append(batch)
        self._busy[lane.broker].setdefault(lane)

    def _lane(self, broker: str, batch: Batch, queue_id: int) -> Lane:
        key = (broker, batch.topic, queue_id, batch.timed)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(self.producer_id, *key)
        return lane

    def _link(self, broker: str) -> Link:
        link = self._links.get(broker)
        if link is None:
            link = Link(self._client, broker, self._settings.in_flight, self)
            self._links[broker] = link
        return link

    def _wanted_brokers(self) -> set[str]:
        wanted = {broker for broker, lanes in self._busy.items() if lanes}
        for topic in self._pools:
            wanted.update(self._served_by(topic))
        return wanted

    def _served_by(self, topic: str) -> dict[str, int]:
        """The brokers that take messages of the topic now, and how many queues each has."""
        served = self._served.get(topic)
        if served is None:
            route = self._client.routes.route(topic)
            brokers = route.brokers if route is not None else ()
            served = {each.broker: each.queues for each in brokers if each.writable}
            self._served[topic] = served
        return served

    def _held(self, link: Link, now: float) -> bool:
        """What waits is little, and had better wait for an answer that is on its way."""
        links = self._links.values()
        if not link.in_flight:
            latest = max((each.sent for each in links if each.in_flight), default=0.0)
            if self._hold_over or latest + HOLD_S <= now:
                return False
        in_flight = sum(each.in_flight_bytes for each in links)
        if self._outbox.used_bytes - in_flight >= HOLD_BYTES:
            return False
        if not link.in_flight and self._holding is None:
            self._holding = self._loop.call_later(HOLD_S, self._hold_ended)
        return True

    def _hold_ended(self) -> None:
        self._holding = None
        self._hold_over = True
        self.pump()
        self._hold_over = False

    def _frame_for(self, link: Link, now: float) -> Frame | None:
        batches: list[Batch] = []
        room = self._settings.frame_bytes
        lanes = self._busy[link.broker]
        for lane in list(lanes):
            if room <= 0:
                break
            batch = self._next_of(lane, room if batches else None)
            if batch is not None:
                self._number(lane, batch)
                batches.append(batch)
                room -= batch.size
            del lanes[lane]
            if lane.waiting:
                lanes[lane] = None  # to the end: every lane has its turn
        for topic in list(self._pools):
            if room <= 0:
                break
            pooled = self._from_pool(link, topic, room if batches else None, now)
            if pooled is not None:
                batches.append(pooled)
                room -= pooled.size
        return Frame(batches) if batches else None

    def _next_of(self, lane: Lane, room: int | None) -> Batch | None:
        waiting = lane.waiting
        while waiting and waiting[0].done:
            waiting.popleft()
        if not waiting or not lane.sendable:
            return None
        if room is not None and waiting[0].size > room:
            return None
        return waiting.popleft()

    def _from_pool(self, link: Link, topic: str, room: int | None, now: float) -> Batch | None:
        pool = self._pools[topic]
        while pool and pool[0].done:
            pool.popleft()
        if not pool:
            del self._pools[topic]
            return None
        if room is not None and pool[0].size > room:
            return None
        if not self._may_take(link.broker, topic, now):
            return None
        lane = self._free_lane(link.broker, pool[0])
        if lane is None:
            return None
        batch = pool.popleft()
        if not pool:
            del self._pools[topic]
        self._broker_turn += 1
        self._number(lane, batch)
        return batch

    def _may_take(self, broker: str, topic: str, now: float) -> bool:
        """A broker that failed or is slow is passed over while the topic has a better one up."""
        now_ms = now * 1000
        if self._health.available(broker, now_ms):
            return True
        return not any(
            self._health.available(other, now_ms) and other in self._links and self._links[other].up
            for other in self._served_by(topic)
        )

    def _free_lane(self, broker: str, batch: Batch) -> Lane | None:
        """The next queue of the broker whose lane may send."""
        queues = self._served_by(batch.topic).get(broker, 0)
        if not queues:
            return None
        if batch.timed:
            lane = self._lane(broker, batch, ANY_QUEUE)
            return lane if lane.sendable and not lane.waiting else None
        turn = self._queue_turns[broker, batch.topic]
        for step in range(queues):
            lane = self._lane(broker, batch, (turn + step) % queues)
            if lane.sendable and not lane.waiting:
                self._queue_turns[broker, batch.topic] = turn + step + 1
                return lane
        return None

    def _number(self, lane: Lane, batch: Batch) -> None:
        self._outbox.seal(batch)
        batch.encode(lane.queue_id, lane.number())
        batch.lane = lane
        batch.in_flight = True

    # ── what links tell ──────────────────────────────────────────────────────────────

    def answered(self, link: Link, frame: Frame, answer: Any, took_s: float) -> list[Batch]:
        """Settles the frame's batches; answers those whose outcome is still unknown."""
        now_ms = time.monotonic() * 1000
        self._health.answered(link.broker, took_s * 1000, now_ms)
        refused = False
        unknown: list[Batch] = []
        for batch, result in zip(frame.batches, answer.results, strict=True):
            lane = batch.lane
            if lane is None:
                continue  # given up meanwhile; its stream is being replaced
            if result.HasField("error"):
                error = status.from_proto(result.error)
                if frame.repeated and _undecided(lane, batch, error):
                    lane.doubt(batch)
                    unknown.append(batch)
                    refused |= self._leave_in_peace(link, error)
                    continue
                batch.in_flight = False
                refused |= self._refused(link, lane, batch, error, repeated=frame.repeated)
                continue
            batch.in_flight = False
            lane.stored(batch)
            self._keep_turn(lane)
            self._outbox.release(batch.size)  # first: a done-callback may submit
            batch.stored(
                answer.broker or link.broker,
                answer.store_id,
                result.queue_id,
                result.base_offset,
                result.store_ms,
                result.due_ms,
            )
        if not refused:
            self._refusals.pop(link.broker, None)
        return unknown

    def _refused(
        self, link: Link, lane: Lane, batch: Batch, error: DuemqError, *, repeated: bool
    ) -> bool:
        """Deals with a batch that was not stored.  True if the broker is to be left in peace.

        `repeated`: it was sent on an earlier stream, and what that did with it is not known.
        """
        if isinstance(error, OutOfSequence) and (_missing_before(error) or not repeated):
            lane.out_of_sequence(batch)
            self._keep_turn(lane)
            if lane.refusals > self._settings.in_flight:
                self._pause(link)
            return lane.refusals > self._settings.in_flight
        if not repeated and _may_be_repeated(error):
            lane.refused(batch, again=batch.queue is not None)
            if batch.queue is None:
                batch.lane = None
                self._pools.setdefault(batch.topic, deque()).appendleft(batch)
            self._keep_turn(lane)
            return self._leave_in_peace(link, error)
        if isinstance(error, FencedProducer):
            lane.overtaken()
        elif repeated or isinstance(error, Internal | Timeout):
            # Its numbers may be used up.
            lane.lost(batch)
        else:
            lane.refused(batch, again=False)
        self._keep_turn(lane)
        if isinstance(error, TopicNotFound | QueueNotFound):
            # Deleted, or smaller than it was: the next call asks anew.
            self.targets.pop(batch.topic, None)
        self._fail(batch, _doubted(error) if repeated else error)
        return False

    def _leave_in_peace(self, link: Link, error: DuemqError) -> bool:
        link.last_error = error
        self._health.failed(link.broker, time.monotonic() * 1000)
        self._pause(link)
        return True

    def _keep_turn(self, lane: Lane) -> None:
        if lane.waiting:
            self._busy[lane.broker].setdefault(lane)

    def _pause(self, link: Link) -> None:
        backoff = self._refusals.setdefault(link.broker, Backoff(REFUSED_S_MIN, REFUSED_S_MAX))
        until = link.paused_until = time.monotonic() + backoff.next_s()
        self._loop.call_at(until, self._pause_ended, link, until)

    def _pause_ended(self, link: Link, until: float) -> None:
        if link.paused_until == until:
            link.paused_until = 0.0
            self.pump()

    def broken(self, link: Link, error: DuemqError) -> None:
        """New messages avoid the broker for a while."""
        self._health.failed(link.broker, time.monotonic() * 1000)
        self.pump()

    def _routes_changed(self) -> None:
        self._served.clear()
        for link in self._links.values():
            link.hurry()
        for target in self.targets.values():
            target.queues = self._client.routes.keyed(target.topic) or target.queues
        self.pump()

    # ── deadlines ────────────────────────────────────────────────────────────────────

    def _expire(self, now: float) -> None:
        while self.open and (self.open[0].done or self.open[0].deadline <= now):
            batch = self.open.popleft()
            if not batch.done:
                self._give_up(batch)

    def _give_up(self, batch: Batch) -> None:
        seconds = self._settings.send_timeout_s
        link = self._links.get(batch.lane.broker) if batch.lane and batch.in_flight else None
        if link is None or batch.lane is None:
            cause = self._cause(batch)
            self._fail(batch, Timeout(f"not sent within {seconds} s{cause}", limit=seconds))
            return
        cause = f": {link.last_error}" if link.last_error else ""
        error = Timeout(
            f"broker {link.broker} did not confirm it within {seconds} s; whether the message is "
            f"stored is unknown{cause}",
            limit=seconds,
        )
        batch.lane.lost(batch)
        self._keep_turn(batch.lane)
        self._fail(batch, error)
        if not link.keeps(batch):
            link.reset(error)

    def _cause(self, batch: Batch) -> str:
        names = {batch.queue.broker} if batch.queue else set(self._served_by(batch.topic))
        errors = [
            f"{name}: {self._links[name].last_error}"
            for name in sorted(names)
            if name in self._links and self._links[name].last_error
        ]
        if not names:
            return f": no broker serves topic {batch.topic!r} now"
        return f" ({'; '.join(errors)})" if errors else ""

    def _fail(self, batch: Batch, error: DuemqError) -> None:
        self._outbox.seal(batch)
        self._outbox.release(batch.size)
        batch.failed(error)
        self._losses.add(batch, error)

    def _set_timer(self) -> None:
        if self._timer is None and self.open:
            self._timer = self._loop.call_at(self.open[0].deadline, self._deadline_came)

    def _deadline_came(self) -> None:
        self._timer = None
        self.pump()


def _undecided(lane: Lane, batch: Batch, error: DuemqError) -> bool:
    """Whether this answer to a repeat leaves open what the earlier attempt did, or will do."""
    if isinstance(error, OutOfSequence):
        # A late copy of a batch in front of it, and so of this one, may be on its way.
        return _missing_before(error) and lane.doubtful_before(batch)
    return _may_be_repeated(error)


def _may_be_repeated(error: DuemqError) -> bool:
    """The same batch can succeed later, under the same numbers."""
    return error.retryable and not isinstance(error, Timeout)


def _missing_before(error: OutOfSequence) -> bool:
    """The broker does not have the batch, as it expects one in front of it.

    Otherwise it has it, and no longer knows where.
    """
    sequence, expected = error.value, error.limit
    return sequence.isdecimal() and expected.isdecimal() and int(sequence) > int(expected)


def _doubted(error: DuemqError) -> DuemqError:
    """The refusal of a repeat, with what it does not tell."""
    if isinstance(error, Fenced):
        return Timeout(f"whether the message is stored is unknown: {error}")
    return type(error)(
        f"{error.message}; an earlier attempt may have been stored",
        field=error.field,
        value=error.value,
        limit=error.limit,
        retryable=error.retryable,
    )
