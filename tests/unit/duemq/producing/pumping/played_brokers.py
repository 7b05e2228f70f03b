"""Brokers and streams for a pump, played: no clock, no wire, no task.

A broker keeps the rules of protos/README.md, "Sends".  What was on its way when a stream broke may
still arrive, later than what was sent after it.  What is refused for what it holds always is.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from duemq.errors import (
    FencedProducer,
    OutOfSequence,
    Overloaded,
    Rejected,
    TooLarge,
    Unavailable,
)
from duemq.producing.outbox import Outbox
from duemq.producing.pumping.in_flight import Answer
from duemq.producing.pumping.pump import NEVER, Pump
from duemq.protocol.route import Broker, BrokerQueues, Route, RouteCache, Update
from duemq.settings import ProducerSettings

WAIT_S = 0.05
SEND_TIMEOUT_S = 10.0


class Sent(NamedTuple):
    """A batch as it is on the wire."""

    number: int
    lane: tuple
    epoch: int
    sequence: int
    records: int = 1


class StoredBatch(NamedTuple):
    """What a broker answers."""

    queue_id: int
    base_offset: int
    store_ms: int = 1
    due_ms: bytes = b""
    duplicate: bool = False


@dataclass
class LaneState:
    epoch: int = -1
    next_sequence: int = 0
    placed: dict = field(default_factory=dict)


class PlayedBroker:
    """What it stored, and the stream to it."""

    def __init__(self, name):
        self.name = name
        self.lanes = defaultdict(LaneState)
        self.stored = []
        self.never = {}
        self.wanted = self.up = False
        self.frames = deque()  # on their way
        self.answers = deque()  # on their way back
        self.late = deque()  # of broken streams

    def take(self, sent, refusal=None):
        """Stores a batch, or answers why not."""
        lane = self.lanes[sent.lane]
        if sent.epoch < lane.epoch:
            return FencedProducer("a newer epoch")
        if sent.epoch == lane.epoch:
            if sent.sequence in lane.placed:
                return lane.placed[sent.sequence]._replace(duplicate=True)
            if sent.sequence != lane.next_sequence:
                return OutOfSequence("m", value=sent.sequence, limit=lane.next_sequence)
        refusal = self.never.get((sent.number, sent.records), refusal)
        if isinstance(refusal, Rejected):
            self.never[sent.number, sent.records] = refusal
        if refusal is not None:
            return refusal
        if sent.epoch > lane.epoch:
            lane.epoch, lane.placed = sent.epoch, {}
        self.stored.append(sent.number)
        queue_id = max(0, sent.lane[1])
        lane.placed[sent.sequence] = StoredBatch(queue_id, len(self.stored) - 1)
        lane.next_sequence = sent.sequence + 1
        return lane.placed[sent.sequence]

    def arrive(self, refusals=()):
        """The next frame is processed; `refusals` by its batches' places."""
        request_id, batches = self.frames.popleft()
        results = [self.take(sent, dict(refusals).get(i)) for i, sent in enumerate(batches)]
        self.answers.append(Answer(request_id, self.name, 7, results))

    def lose(self):
        """The stream is gone; what was on its way may still come."""
        self.up = False
        self.late += [batches for _, batches in self.frames]
        self.frames.clear()
        self.answers.clear()

    def arrive_late(self):
        for sent in self.late.popleft():
            self.take(sent)


class FixedWaits:
    def next_s(self):
        return WAIT_S


def overloaded():
    return Overloaded("busy")


def too_large():
    """The large ones of `PlayedCluster.offer`, and no others."""
    return TooLarge("no", field="body", value=200, limit=100)


class PlayedCluster:
    """A pump among brokers."""

    def __init__(self, brokers=("a",), queues=1, **settings):
        self.now_ms = 1_000_000.0
        self.routes = RouteCache()
        self.outbox = Outbox(1 << 30, 100_000, lambda: None)
        chosen = ProducerSettings(send_timeout_s=SEND_TIMEOUT_S, **settings)
        self.pump = Pump(7 << 40, chosen, self.outbox, self.routes, FixedWaits)
        self.brokers = {name: PlayedBroker(name) for name in brokers}
        self.done = []
        self.next_ms = NEVER
        served = tuple(BrokerQueues(name, "h:1", queues) for name in brokers)
        self.serve(Route("t", served))

    def serve(self, *routes):
        names = {each.broker for route in routes for each in route.brokers}
        self.routes.apply(Update(True, routes, brokers=tuple(Broker(n, "h:1") for n in names)))
        self.pump.routes_changed()

    def open(self, topic="t"):
        return self.pump.targets.get(topic) or self.pump.found(topic, self.now_ms, traced=False)

    def offer(self, key=None, topic="t", bodies=1, large=0):
        """Adds messages that travel in one batch; the pump does not run yet."""
        target = self.open(topic)
        queue = None if key is None else target.queue_for(key)
        given = [b"x" * 200] * large + [b"x" * 100] * bodies
        return self.outbox.add_list(target, queue, given, None, None, 1)

    def submit(self, key=None, topic="t", bodies=1, large=0):
        batch = self.offer(key, topic, bodies, large)
        self.run()
        return batch

    def run(self):
        step = self.pump.run(self.now_ms)
        for name in step.want:
            self.brokers[name].wanted = True
        for name, error in step.resets:
            self.brokers[name].lose()
            self.pump.broke(name, error, self.now_ms)
        for name, frame in step.frames:
            assert self.brokers[name].up
            self._send(name, frame)
        for batch in step.done:
            assert batch.done
            batch.wake()
        self.done += step.done
        self.next_ms = step.next_ms
        assert step.next_ms > self.now_ms
        return step

    def _send(self, name, frame):
        frame.sent_ms = self.now_ms
        sent = [
            Sent(
                each.number,
                (each.topic, each.queue_id, each.timed),
                each.epoch,
                each.sequence,
                each.count - len(each.errors),
            )
            for each in frame.batches
        ]
        self.brokers[name].frames.append((frame.request_id, sent))

    def connect(self, name="a"):
        """The stream stands."""
        self.brokers[name].up = True
        for frame in self.pump.came_up(name):
            self._send(name, frame)
        self.run()

    def break_stream(self, name="a"):
        self.brokers[name].lose()
        self.pump.broke(name, Unavailable(f"{name} is away"), self.now_ms)
        self.run()

    def answer(self, name="a"):
        """The next answer reaches the pump."""
        self.pump.answered(name, self.brokers[name].answers.popleft(), self.now_ms)
        self.run()

    def serve_all(self, name="a", refusal=None):
        """Everything on its way is processed and answered; the first batch is refused."""
        broker = self.brokers[name]
        refusals = [] if refusal is None else [(0, refusal)]
        while broker.frames or broker.answers:
            while broker.frames:
                broker.arrive(refusals)
                refusals = []
            self.answer(name)

    def pass_ms(self, ms):
        self.now_ms += ms
        self.run()
