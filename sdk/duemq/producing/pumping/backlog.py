"""What waits to be numbered, and whose turn it is.

A batch with an ordering key, or a due time and a queue, has its queue from the start and waits in
that queue's lane.  The others wait in their topic's pool and are taken by whichever broker has
room, so that each broker gets what it can digest.  Lanes take turns, and so do a broker's queues
and the topics' pools.
"""

from collections import defaultdict, deque
from collections.abc import Callable

from duemq.producing.batch import Batch
from duemq.producing.outbox import Outbox
from duemq.producing.pumping.in_flight import Frame
from duemq.producing.pumping.sequence_lane import SequenceLane
from duemq.protocol.limits import BATCHES_MAX
from duemq.protocol.route import RouteCache

ANY_QUEUE = -1


class Backlog:
    """One producer's."""

    def __init__(
        self,
        producer_id: int,
        routes: RouteCache,
        outbox: Outbox,
        may_take: Callable[[str, str, float], bool],
    ) -> None:
        """`may_take`: whether a broker may have a topic's pool now."""
        self.turn = producer_id & 0xFFFF_FFFF
        """Which broker is asked first."""
        self._producer_id = producer_id
        self._routes = routes
        self._outbox = outbox
        self._may_take = may_take
        self._lanes: dict[tuple[str, str, int, bool], SequenceLane] = {}
        # Lanes with something waiting, by broker, in the order of their turns.
        self._busy: defaultdict[str, dict[SequenceLane, None]] = defaultdict(dict)
        self._pools: dict[str, deque[Batch]] = {}
        self._served: dict[str, dict[str, int]] = {}
        # Producers that send little begin at different brokers and queues, each by its own lot.
        first = producer_id >> 32
        self._queue_turns: defaultdict[tuple[str, str], int] = defaultdict(lambda: first)

    def __bool__(self) -> bool:
        return bool(self._pools) or any(self._busy.values())

    def add(self, batch: Batch) -> None:
        """It waits behind all that came before."""
        if batch.queue is None:
            self._pools.setdefault(batch.topic, deque()).append(batch)
        else:
            lane = self._lane(batch.queue.broker, batch, batch.queue.queue_id)
            lane.waiting.append(batch)
            self.keep_turn(lane)

    def put_back(self, batch: Batch) -> None:
        """It waits in front of its topic's pool, for any broker."""
        self._pools.setdefault(batch.topic, deque()).appendleft(batch)

    def drop_done(self, batch: Batch) -> None:
        """Where the batch waits, those at the head that are done go: nobody else may ever look."""
        if batch.queue is not None:
            lane = self._lane(batch.queue.broker, batch, batch.queue.queue_id)
            if not _without_done(lane.waiting):
                self._busy[lane.broker].pop(lane, None)
        elif batch.topic in self._pools and not _without_done(self._pools[batch.topic]):
            del self._pools[batch.topic]

    def keep_turn(self, lane: SequenceLane) -> None:
        """The lane may have got something that waits."""
        if lane.waiting:
            self._busy[lane.broker].setdefault(lane)

    def routes_changed(self) -> None:
        """Who serves what is looked up anew."""
        self._served.clear()

    def brokers(self) -> set[str]:
        """Those that something waits for."""
        wanted = {broker for broker, lanes in self._busy.items() if lanes}
        for topic in self._pools:
            wanted.update(self.served_by(topic))
        return wanted

    def served_by(self, topic: str) -> dict[str, int]:
        """The brokers that take messages of the topic now, and how many queues each has."""
        served = self._served.get(topic)
        if served is None:
            route = self._routes.route(topic)
            brokers = route.brokers if route is not None else ()
            served = {each.broker: each.queues for each in brokers if each.writable}
            self._served[topic] = served
        return served

    def lane_of(self, batch: Batch) -> SequenceLane:
        """Which numbered the batch."""
        return self._lane(batch.broker, batch, batch.queue_id)

    def next_frame(self, broker: str, room: int, now_ms: float) -> Frame | None:
        """Numbers what the broker is sent next: up to `room` bytes, or one batch."""
        batches: list[Batch] = []
        lanes: list[SequenceLane] = []
        busy = self._busy[broker]
        for lane in list(busy):
            if room <= 0 or len(batches) == BATCHES_MAX:
                break
            batch = self._next_of(lane, room if batches else None)
            if batch is not None:
                self._number(lane, batch)
                batches.append(batch)
                lanes.append(lane)
                room -= batch.size
            del busy[lane]
            if lane.waiting:
                busy[lane] = None  # to the end: every lane has its turn
        for topic in list(self._pools):
            if room <= 0 or len(batches) == BATCHES_MAX:
                break
            free = self._pool_lane(broker, topic, room if batches else None, now_ms)
            if free is not None:
                pooled = self._pools[topic].popleft()
                if not self._pools[topic]:
                    del self._pools[topic]
                self.turn += 1
                self._number(free, pooled)
                batches.append(pooled)
                lanes.append(free)
                room -= pooled.size
        return Frame(batches, lanes) if batches else None

    def _next_of(self, lane: SequenceLane, room: int | None) -> Batch | None:
        waiting = _without_done(lane.waiting)
        if not waiting or not lane.sendable:
            return None
        if room is not None and waiting[0].size > room:
            return None
        return waiting.popleft()

    def _pool_lane(
        self, broker: str, topic: str, room: int | None, now_ms: float
    ) -> SequenceLane | None:
        """For the first batch of the pool, if the broker may take it now."""
        pool = _without_done(self._pools[topic])
        if not pool:
            del self._pools[topic]
            return None
        if room is not None and pool[0].size > room:
            return None
        if not self._may_take(broker, topic, now_ms):
            return None
        return self._free_lane(broker, pool[0])

    def _free_lane(self, broker: str, batch: Batch) -> SequenceLane | None:
        """The next queue of the broker whose lane may send."""
        queues = self.served_by(batch.topic).get(broker, 0)
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

    def _lane(self, broker: str, batch: Batch, queue_id: int) -> SequenceLane:
        key = (broker, batch.topic, queue_id, batch.timed)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = SequenceLane(self._producer_id, *key)
        return lane

    def _number(self, lane: SequenceLane, batch: Batch) -> None:
        self._outbox.seal(batch)
        batch.encode(lane.queue_id, lane.number())
        batch.broker = lane.broker
        batch.in_flight = True


def _without_done(waiting: deque[Batch]) -> deque[Batch]:
    """Drops what is done at its head."""
    while waiting and waiting[0].done:
        waiting.popleft()
    return waiting
