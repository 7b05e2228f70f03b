"""The pump: gives waiting batches a queue and numbers, and brokers frames.

A batch is bound to its lane once it is numbered: until its outcome is known it is sent nowhere
else.  Brokers take turns when several have room.

Events (a batch began, an answer came, a stream came up or broke, the routes changed) change what
the pump knows; `run` then says what is to be done, and when to call it again at the latest.
Owner and only caller: Sender on the event loop.
"""

from collections import deque
from collections.abc import Callable

from duemq.errors import (
    Closed,
    DuemqError,
    FencedProducer,
    Internal,
    InvalidArgument,
    OutOfSequence,
    QueueNotFound,
    Timeout,
    TooLarge,
    TopicNotFound,
)
from duemq.producing.batch import Batch
from duemq.producing.outbox import Outbox, Target
from duemq.producing.pumping import sequence_lane as lanes
from duemq.producing.pumping.backlog import Backlog
from duemq.producing.pumping.broker_health import Health, Patience, Waits
from duemq.producing.pumping.in_flight import Answer, BatchStored, Frame, InFlight
from duemq.producing.pumping.sequence_lane import SequenceLane
from duemq.protocol.route import RouteCache
from duemq.settings import ProducerSettings

# While a frame is on its way to a broker, a further one to it leaves only when HOLD_BYTES wait:
# below that, to wait for an answer makes fuller frames and less work for all.
HOLD_BYTES = 32 * 1024
# For the answer of another broker it waits as well, but no longer than this.
HOLD_MS = 2.0
NEVER = float("inf")


class PumpStep:
    """What is to be done, in this order."""

    def __init__(self) -> None:
        self.want: set[str] = set()
        """Brokers to connect to."""
        self.resets: list[tuple[str, DuemqError]] = []
        """Brokers whose stream is to be given up for a new one, and why."""
        self.frames: list[tuple[str, Frame]] = []
        """To be sent, to which broker."""
        self.done: list[Batch] = []
        """Stored or failed: who waits for them is to be woken, once all the rest is done."""
        self.next_ms = NEVER
        """When `run` wants to be called next, if nothing happens before."""


class Pump:
    """One producer's.  All times are of a monotonic clock."""

    def __init__(
        self,
        producer_id: int,
        settings: ProducerSettings,
        outbox: Outbox,
        routes: RouteCache,
        waits: Callable[[], Waits],
    ) -> None:
        """`waits`: made for each broker that refuses, dropped when it takes something again."""
        self.settings = settings
        self.targets: dict[str, Target] = {}
        """By topic.  Read by callers' threads."""
        self.early: deque[Batch] = deque()
        """Batches whose topic is not found yet, in the order they began."""
        self.open: deque[Batch] = deque()
        """Batches taken in and not done, in the order they began; done ones among them."""
        self._outbox = outbox
        self._routes = routes
        self._health = Health()
        self._patience = Patience(waits)
        self._backlog = Backlog(producer_id, routes, outbox, self._may_take)
        self._in_flight: dict[str, InFlight] = {}
        self._finding: dict[str, Target] = {}
        self._hold_until_ms: float | None = None
        self._step = PumpStep()

    # ── topics ───────────────────────────────────────────────────────────────────────

    def seek(self, topic: str, *, traced: bool) -> Target:
        """A topic is being looked for: what is sent to it waits until `found` or `not_found`."""
        target = self._finding[topic] = Target(topic, (), traced, found=False)
        return target

    def sought(self, topic: str) -> Target | None:
        """The target of a topic that is being looked for."""
        return self._finding.get(topic)

    def found(self, topic: str, now_ms: float, *, traced: bool) -> Target:
        """The routes have the topic."""
        target = self._finding.pop(topic, None) or Target(topic, (), traced)
        target.queues, target.found = self._routes.keyed(topic), True
        self.targets[topic] = target
        for batch in self._take_early(topic):
            key, _ = batch.way
            if isinstance(key, str):
                try:
                    batch.queue = target.queue_for(key)
                except TopicNotFound as error:
                    self._fail(batch, error)
                    continue
            self._take(batch, now_ms)
        return target

    def not_found(self, topic: str, error: DuemqError) -> None:
        """What waits for the topic fails."""
        self._finding.pop(topic, None)
        for batch in self._take_early(topic):
            self._fail(batch, error)

    def _take_early(self, topic: str) -> list[Batch]:
        taken = [batch for batch in self.early if batch.topic == topic]
        left = [batch for batch in self.early if batch.topic != topic]
        self.early.clear()
        self.early.extend(left)
        return taken

    def brokers_of(self, topic: str) -> list[str]:
        """Those that take its messages now; the one whose turn it is comes first."""
        served = list(self._backlog.served_by(topic))
        first = self._backlog.turn % len(served) if served else 0
        return served[first:] + served[:first]

    def routes_changed(self) -> None:
        """Brokers or queues came or went."""
        self._backlog.routes_changed()
        for topic, target in list(self.targets.items()):
            queues = self._routes.keyed(topic)
            if queues:
                target.queues = queues
            else:  # deleted, as none of its brokers is away: the next call asks anew
                del self.targets[topic]

    # ── what is done ─────────────────────────────────────────────────────────────────

    def run(self, now_ms: float) -> PumpStep:
        """Fills the brokers that have room, gives up what is too late."""
        self._take_in(now_ms)
        self._expire(now_ms)
        for broker, in_flight in self._in_flight.items():
            if in_flight.may_repeat(now_ms):
                self._step.frames += [(broker, frame) for frame in in_flight.repeat()]
        hold_over = self._hold_until_ms is not None and self._hold_until_ms <= now_ms
        if hold_over:
            self._hold_until_ms = None
        if self._backlog:
            self._fill(now_ms, hold_over=hold_over)
        step, self._step = self._step, PumpStep()
        step.next_ms = self._next_ms(now_ms)
        return step

    def _take_in(self, now_ms: float) -> None:
        for batch in self._outbox.take_arrivals():
            if batch.topic in self._finding:
                self.early.append(batch)
            else:
                self._take(batch, now_ms)

    def _take(self, batch: Batch, now_ms: float) -> None:
        batch.deadline_ms = now_ms + self.settings.send_timeout_s * 1000
        self.open.append(batch)
        self._backlog.add(batch)

    def _fill(self, now_ms: float, *, hold_over: bool) -> None:
        for name in self._backlog.brokers():
            if not self.to(name).up:
                self._step.want.add(name)
        names = sorted(name for name, each in self._in_flight.items() if each.ready(now_ms))
        start = self._backlog.turn % len(names) if names else 0
        for name in names[start:] + names[:start]:
            in_flight = self._in_flight[name]
            while (
                in_flight.ready(now_ms)
                and self._backlog
                and not self._held(in_flight, now_ms, hold_over=hold_over)
            ):
                frame = self._backlog.next_frame(name, self.settings.frame_bytes, now_ms)
                if frame is None:
                    break
                in_flight.put(frame, now_ms)
                self._step.frames.append((name, frame))

    def to(self, broker: str) -> InFlight:
        """What is on its way there."""
        in_flight = self._in_flight.get(broker)
        if in_flight is None:
            in_flight = self._in_flight[broker] = InFlight(broker, self.settings.in_flight)
        return in_flight

    def _held(self, in_flight: InFlight, now_ms: float, *, hold_over: bool) -> bool:
        """What waits is little, and had better wait for an answer that is on its way."""
        everywhere = self._in_flight.values()
        latest_ms = 0.0
        if not in_flight.awaited:
            latest_ms = max((each.put_ms for each in everywhere if each.awaited), default=0.0)
            if hold_over or latest_ms + HOLD_MS <= now_ms:
                return False
        if self._outbox.used_bytes - sum(each.bytes for each in everywhere) >= HOLD_BYTES:
            return False
        if not in_flight.awaited and self._hold_until_ms is None:
            self._hold_until_ms = latest_ms + HOLD_MS
        return True

    def _may_take(self, broker: str, topic: str, now_ms: float) -> bool:
        """A broker that failed or is slow is passed over while the topic has a better one up."""
        if self._health.available(broker, now_ms):
            return True
        return not any(
            self._health.available(other, now_ms)
            and other in self._in_flight
            and self._in_flight[other].up
            for other in self._backlog.served_by(topic)
        )

    def _next_ms(self, now_ms: float) -> float:
        next_ms = self.open[0].deadline_ms if self.open else NEVER
        if self._hold_until_ms is not None:
            next_ms = min(next_ms, self._hold_until_ms)
        for each in self._in_flight.values():
            if now_ms < each.paused_until_ms < next_ms:
                next_ms = each.paused_until_ms
        if self._backlog:  # the one that is not avoided may not answer
            next_ms = min(next_ms, *self._health.avoided(now_ms).values(), NEVER)
        return next_ms

    # ── what streams tell ────────────────────────────────────────────────────────────

    def came_up(self, broker: str) -> list[Frame]:
        """A stream stands: answers what is to be sent on it first."""
        return self.to(broker).came_up()

    def broke(self, broker: str, error: DuemqError, now_ms: float) -> None:
        """A stream broke or did not come up: new messages avoid the broker for a while."""
        in_flight = self.to(broker)
        in_flight.broke(error)
        in_flight.drop_done()
        self._health.failed(broker, now_ms)

    def answered(self, broker: str, answer: Answer, now_ms: float) -> None:
        """Settles the frame's batches; those whose outcome is still unknown are sent again.

        Raises Internal for an answer that fits no frame: the stream is to be given up.
        """
        in_flight = self.to(broker)
        frame = in_flight.answered(answer.request_id, len(answer.results))
        self._health.answered(broker, now_ms - frame.sent_ms, now_ms)
        refused = False
        unknown: list[Batch] = []
        results = frame.judged(answer.results)
        for batch, lane, result in zip(frame.batches, frame.lanes, results, strict=True):
            if batch.done:
                continue  # given up meanwhile; its stream is being replaced
            if not isinstance(result, DuemqError):
                self._stored(lane, batch, answer, result)
            elif frame.repeated and lane.undecided(batch, result):
                lane.doubt(batch)
                unknown.append(batch)
                refused |= self._leave_in_peace(in_flight, result, now_ms)
            else:
                batch.in_flight = False
                refused |= self._refused(in_flight, lane, batch, result, frame.repeated, now_ms)
        if not refused:
            self._patience.over(broker)
        if unknown:
            in_flight.keep(Frame(unknown, list(map(self._backlog.lane_of, unknown)), repeated=True))

    def _stored(
        self, lane: SequenceLane, batch: Batch, answer: Answer, result: BatchStored
    ) -> None:
        batch.in_flight = False
        lane.stored(batch)
        self._backlog.keep_turn(lane)
        self._outbox.release(batch.size)
        batch.stored(
            answer.broker or lane.broker,
            answer.store_id,
            result.queue_id,
            result.base_offset,
            result.store_ms,
            result.due_ms,
        )
        self._step.done.append(batch)

    def _refused(
        self,
        in_flight: InFlight,
        lane: SequenceLane,
        batch: Batch,
        error: DuemqError,
        repeated: bool,
        now_ms: float,
    ) -> bool:
        """Deals with a batch that was not stored.  True if the broker is to be left in peace.

        `repeated`: it was sent on an earlier stream, and what that did with it is not known.
        """
        if isinstance(error, OutOfSequence) and (lanes.missing_before(error) or not repeated):
            lane.out_of_sequence(batch)
            self._backlog.keep_turn(lane)
            if lane.refusals > self.settings.in_flight:
                self._pause(in_flight, now_ms)
            return lane.refusals > self.settings.in_flight
        # What was stored is found before it is looked into, and a late copy is refused as well.
        repeated = repeated and not isinstance(error, InvalidArgument | TooLarge)
        cut = not repeated and batch.leave_out(error)
        if cut or (not repeated and lanes.may_be_repeated(error)):
            lane.refused(batch, again=batch.queue is not None)
            if batch.queue is None:
                self._backlog.put_back(batch)
            self._backlog.keep_turn(lane)
            return not cut and self._leave_in_peace(in_flight, error, now_ms)
        if isinstance(error, FencedProducer):
            lane.overtaken()
        elif repeated or isinstance(error, Internal | Timeout):
            # Its numbers may be used up.
            lane.lost(batch)
        else:
            lane.refused(batch, again=False)
        self._backlog.keep_turn(lane)
        if isinstance(error, TopicNotFound | QueueNotFound):
            # Deleted, or smaller than it was: the next call asks anew.
            self.targets.pop(batch.topic, None)
        self._fail(batch, lanes.doubted(error) if repeated else error)
        return False

    def _leave_in_peace(self, in_flight: InFlight, error: DuemqError, now_ms: float) -> bool:
        in_flight.last_error = error
        self._health.failed(in_flight.broker, now_ms)
        self._pause(in_flight, now_ms)
        return True

    def _pause(self, in_flight: InFlight, now_ms: float) -> None:
        in_flight.paused_until_ms = now_ms + self._patience.wait_ms(in_flight.broker)

    # ── what is given up ─────────────────────────────────────────────────────────────

    def unanswered(self) -> list[Batch]:
        """All that was accepted and is not done, as of the last `run`."""
        return [batch for batch in (*self.early, *self.open) if not batch.done]

    def close(self, now_ms: float) -> PumpStep:
        """What is not done fails with Closed."""
        self._take_in(now_ms)
        for batch in self.unanswered():
            outcome = "its outcome is unknown" if batch.in_flight else "it was not sent"
            self._fail(batch, Closed(f"the producer was closed before the answer; {outcome}"))
        self.early.clear()
        self.open.clear()
        step, self._step = self._step, PumpStep()
        return step

    def _expire(self, now_ms: float) -> None:
        while self.open and (self.open[0].done or self.open[0].deadline_ms <= now_ms):
            batch = self.open.popleft()
            if not batch.done:
                self._give_up(batch)

    def _give_up(self, batch: Batch) -> None:
        seconds = self.settings.send_timeout_s
        if not batch.in_flight:
            cause = self._cause(batch)
            self._fail(batch, Timeout(f"not sent within {seconds} s{cause}", limit=seconds))
            self._backlog.drop_done(batch)
            return
        in_flight, lane = self.to(batch.broker), self._backlog.lane_of(batch)
        cause = f": {in_flight.last_error}" if in_flight.last_error else ""
        error = Timeout(
            f"broker {batch.broker} did not confirm it within {seconds} s; whether the message is "
            f"stored is unknown{cause}",
            limit=seconds,
        )
        lane.lost(batch)
        self._backlog.keep_turn(lane)
        self._fail(batch, error)
        if not in_flight.keeps(batch):
            in_flight.broke(error)
            self._step.resets.append((batch.broker, error))

    def _cause(self, batch: Batch) -> str:
        names = {batch.queue.broker} if batch.queue else set(self._backlog.served_by(batch.topic))
        errors = [
            f"{name}: {self._in_flight[name].last_error}"
            for name in sorted(names)
            if name in self._in_flight and self._in_flight[name].last_error
        ]
        if not names:
            what = "takes messages of" if self._routes.route(batch.topic) else "serves"
            return f": no broker {what} topic {batch.topic!r} now"
        return f" ({'; '.join(errors)})" if errors else ""

    def _fail(self, batch: Batch, error: DuemqError) -> None:
        self._outbox.seal(batch)
        self._outbox.release(batch.size)
        batch.failed(error)
        self._step.done.append(batch)
