"""Dispatch: which due timers go next, in which batch, to which broker and queue.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

Due timers wait per target (home broker, topic, queue), in due order (due_timers.py).  Batches are
cut from the targets in turn, so that a target with a million due timers delays another one by one
batch.  What cannot be sent now (no connection, no route, lane full) goes on waiting, still pending:
it can be cancelled, and it can go elsewhere.  So does what is held (holding/holds.py).  Where only
another route, connection or hold can change that (`is_shut`), nobody looks again until it did.

    target               goes to
    a queue (>= 0)       this queue of the home broker, always; waits for the broker if it is away;
                         of a topic made anew with fewer queues, `queue % queues`
    any (-1)             the home broker's queues in turn; if it is away for `FAILOVER_AFTER_MS`,
                         another connected broker that serves the topic; without a home broker
                         the connected ones in turn

Batches of a target follow one another naturally: while a broker has `PIPELINE_MAX` unanswered, a
further one waits until one of them is answered or `SMALL_ROWS` timers have gathered.  So a batch
costs no delay when all is quick, and batches grow, and their number falls, when the machine is
busy.  Other brokers take the target's timers meanwhile, where they may.

With its DISPATCH entry a batch is bound to its broker for good: the answer may have been lost, and
only the same broker knows whether the batch is stored.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping

from duemq.protocol.limits import BATCHES_MAX
from duemq_server.timer_service.scheduling.due_timers import DueTimers
from duemq_server.timer_service.scheduling.fire_lane import FireBatch, FireLane, FireOutcome
from duemq_server.timer_service.scheduling.holding.holds import Holds, room_number
from duemq_server.timer_service.scheduling.peer import Peer
from duemq_server.timer_service.timers.log_entries import LaneId, TargetId

BATCH_ROWS_MAX = 1_000
BATCH_BYTES_MAX = 512 * 1024
FAILOVER_AFTER_MS = 2_000
PIPELINE_MAX = 2
SMALL_ROWS = 256
NEVER = 1 << 62

Queues = Mapping[str, int]
"""Writable queues of a topic, by broker."""


class Dispatcher:
    """Lanes, what is known of brokers, and the due timers that wait for them."""

    def __init__(self, holds: Holds) -> None:
        """`holds`: what may not go."""
        self._holds = holds
        self.due = DueTimers()
        self.peers: dict[str, Peer] = {}
        self._fence = ""
        self._routes: Mapping[str, Queues] = {}
        self._routes_known = False
        self._topics_went = False  # there may be lanes of topics that are gone
        self._next_queue: dict[str, dict[str, int]] = {}  # by topic and broker
        self._last_broker: dict[str, str] = {}  # that a topic's batch went to
        self._unanswered: dict[int, Counter[FireLane]] = {}  # batches by target
        self.epoch_forgotten = 0
        """The latest of a lane that was forgotten: whoever begins again does so behind it."""
        self.stirred = False
        """Whether more of what waits may go than at the last look."""
        self.wakes = 0
        """How often `wake` was called."""
        self.on_stirred: Callable[[], None] = lambda: None
        """Called when `stirred` was set, and something waits."""

    def gathering(self, target: int) -> Collection[str]:
        """Brokers whose answers the target's next batch had better wait for."""
        lanes = self._unanswered.get(target)
        if lanes is None or self.due.waiting_for(target) >= SMALL_ROWS:
            return ()
        counts: Counter[str] = Counter()
        for lane, count in lanes.items():
            counts[lane.id.broker] += 0 if lane.failures else count
        return {broker for broker in counts if counts[broker] >= PIPELINE_MAX}

    def stir(self) -> None:
        """More of what waits may go now."""
        self.stirred = True
        if self.due.waiting:
            self.on_stirred()

    def wake(self) -> None:
        """As `stir`, of all targets: what `is_shut` says may have changed."""
        self.wakes += 1
        self.due.wake()
        self.stir()

    def busy_targets(self) -> set[int]:
        """Targets for which something waits, be it cancelled, or is on its way."""
        return {*self.due.turns(), *self._unanswered}

    # -- where to ---------------------------------------------------------

    def set_routes(self, routes: Mapping[str, Queues]) -> None:
        """The writable queues of every topic."""
        for topic in self._routes.keys() - routes.keys():
            self._next_queue.pop(topic, None)
            self._last_broker.pop(topic, None)
        self._routes = routes
        self._routes_known = self._topics_went = True
        self.wake()

    def queues(self, topic: str) -> Queues | None:
        """The writable queues of a topic; None: no routes are known yet."""
        return self._routes.get(topic, {}) if self._routes_known else None

    def serves(self, topic: str) -> bool:
        """Whether some broker serves a topic; True also while no routes are known."""
        return not self._routes_known or bool(self._routes.get(topic))

    def peer(self, name: str) -> Peer:
        """The broker of a name; made when first heard of."""
        if name not in self.peers:
            self.peers[name] = Peer(name)
        return self.peers[name]

    @property
    def fence(self) -> str:
        """Not empty: why nothing may be sent, to nobody."""
        return self._fence

    def set_fence(self, fence: str) -> bool:
        """Whether the fence is another now."""
        changed, self._fence = fence != self._fence, fence
        if changed:
            self.wake()
        return changed

    def connected(self, name: str) -> None:
        """Batches can be sent to the broker."""
        self.peer(name).connected = True
        self.wake()

    def disconnected(self, name: str, now_ms: int) -> None:
        """The connection to the broker is gone, with every answer that was due on it."""
        peer = self.peer(name)
        if peer.connected or not peer.down_since_ms:
            peer.down_since_ms = now_ms
        peer.connected = False
        for lane in peer.busy.values():
            lane.disconnected()
        self.stir()

    def lane(self, lane_id: LaneId) -> FireLane:
        """The lane of an id; made when first used."""
        lanes = self.peer(lane_id.broker).lanes
        if lane_id not in lanes:
            lanes[lane_id] = FireLane(lane_id)
        return lanes[lane_id]

    def lanes(self) -> Iterator[FireLane]:
        """Every lane that was used, and not forgotten."""
        for peer in self.peers.values():
            yield from peer.lanes.values()

    def spare_lanes(self, count: int) -> list[FireLane]:
        """Up to so many of which all is answered, and that their brokers have forgotten.

        A broker does with the topic: one that is there and serves others, while this has no route.
        While it still knows the lane, an older release would not get beyond the broker's epoch.
        """
        if not self._topics_went:
            return []
        there = {name for queues in self._routes.values() for name in queues}
        lanes = (lane for name in sorted(there) for lane in self.peer(name).lanes.values())
        gone = [lane for lane in lanes if lane.id.topic not in self._routes]
        self._topics_went = bool(gone)
        return [lane for lane in gone if not lane.unacked][:count]

    def forget(self, lane_id: LaneId) -> None:
        """Nothing is known of a lane any more; all of it is answered."""
        lane = self.peer(lane_id.broker).lanes.pop(lane_id, None)
        if lane is not None:
            self.epoch_forgotten = max(self.epoch_forgotten, lane.epoch)

    def choose(self, target: TargetId, now_ms: int, but: Collection[str] = ()) -> FireLane | None:
        """The lane that the target's next batch belongs to; None: not now.  `but`: not there."""
        if self._is_held(target):
            return None
        queues = self._routes.get(target.topic, {})
        if target.queue_id >= 0:
            count = queues.get(target.broker, 0)
            if not count or target.broker in but or not self._open(target.broker):
                return None
            return self._usable(LaneId(target.broker, target.topic, target.queue_id % count))
        for broker in self._candidates(target, queues, now_ms):
            count = 0 if broker in but else queues[broker]
            lane = self._next_lane(broker, target.topic, count)
            if lane is not None:
                self._last_broker[target.topic] = broker
                return lane
        return None

    def _candidates(self, target: TargetId, queues: Queues, now_ms: int) -> list[str]:
        if not target.broker:
            return self._in_turn(target.topic, self._all_open(queues))
        home = self.peer(target.broker)
        if home.connected and queues.get(target.broker, 0) > 0:
            return [target.broker] if self._open(target.broker) else []
        home.down_since_ms = home.down_since_ms or now_ms
        if not home.connected and now_ms - home.down_since_ms < FAILOVER_AFTER_MS:
            return []
        return self._all_open(queues)

    def _all_open(self, queues: Queues) -> list[str]:
        return [name for name, count in sorted(queues.items()) if count > 0 and self._open(name)]

    def _in_turn(self, topic: str, brokers: list[str]) -> list[str]:
        """Ascending brokers, those behind the topic's last one first."""
        first = bisect.bisect_right(brokers, self._last_broker.get(topic, ""))
        return brokers[first:] + brokers[:first]

    def next_failover_ms(self, now_ms: int) -> int:
        """When timers that wait for their broker may go to another; NEVER: none will."""
        if not self.due.waiting:
            return NEVER
        times = (
            peer.down_since_ms + FAILOVER_AFTER_MS
            for peer in self.peers.values()
            if not peer.connected and peer.down_since_ms
        )
        return min((time_ms for time_ms in times if time_ms > now_ms), default=NEVER)

    def _open(self, broker: str) -> bool:
        return self.peer(broker).is_open() and not self._fence

    def _next_lane(self, broker: str, topic: str, queues: int) -> FireLane | None:
        turns = self._next_queue.setdefault(topic, {})
        first = turns.get(broker, 0)
        for step in range(queues):
            queue = (first + step) % queues
            lane = self._usable(LaneId(broker, topic, queue))
            if lane is not None:
                turns[broker] = queue + 1
                return lane
        return None

    def is_stuck(self, number: int, target: TargetId, now_ms: int) -> bool:
        """Whether what waits for a target, of that number, had better not wait in memory.

        Not what only waits for its turn: it goes in a moment, and in its order.
        """
        if self.due.is_asleep(number):
            return True
        if self.choose(target, now_ms) is not None:
            self.due.flows(number)
            return False
        if not self._may_go(target):
            return True
        return self.due.is_slow(number, now_ms)

    def _may_go(self, target: TargetId) -> bool:
        """Whether some broker takes what is sent for a target, as far as is known."""
        if self._fence or self._is_held(target):
            return False
        queues = self._routes.get(target.topic, {})
        home = bool(target.broker) and self.peer(target.broker).connected
        names = [target.broker] if home or target.queue_id >= 0 else list(queues)
        return any(queues.get(name) and self.peer(name).takes(target.topic) for name in names)

    def is_shut(self, target: TargetId) -> bool:
        """Whether nothing can go to a target, whatever is answered and however long it takes.

        Until `wake`: other routes, a connection, a hold or a fence that ends.
        """
        if self._fence or self._is_held(target):
            return True
        queues = self._routes.get(target.topic, {})
        if target.queue_id >= 0:
            return not (queues.get(target.broker) and self.peer(target.broker).connected)
        return not any(count > 0 and self.peer(name).connected for name, count in queues.items())

    def _is_held(self, target: TargetId) -> bool:
        return target.topic in self._holds.topics or room_number(target) is not None

    def _usable(self, lane_id: LaneId) -> FireLane | None:
        lane = self.lane(lane_id)
        return None if lane.full() or lane.failures else lane

    # -- on the way -------------------------------------------------------

    def push(self, batch: FireBatch) -> None:
        """A batch is bound to its lane."""
        batch.lane.push(batch)
        peer = self.peer(batch.lane.id.broker)
        peer.unacked_bytes += len(batch.records)
        peer.busy[batch.lane.id] = batch.lane
        self._unanswered.setdefault(batch.target, Counter())[batch.lane] += 1

    def answered(
        self, batch: FireBatch, outcome: FireOutcome, now_ms: int, jitter: float, reason: str = ""
    ) -> bool:
        """As FireLane.answered; True: it is stored."""
        peer = self.peer(batch.lane.id.broker)
        peer.count(batch.lane, -1)
        stored = batch.lane.answered(batch, outcome, now_ms, jitter, reason)
        peer.count(batch.lane, 1)
        if stored:
            self.stored(batch)
        return stored

    def stored(self, batch: FireBatch) -> None:
        """A batch of a lane was answered as stored."""
        peer = self.peer(batch.lane.id.broker)
        peer.unacked_bytes -= len(batch.records)
        lanes = self._unanswered[batch.target]
        lanes[batch.lane] -= 1
        if not lanes[batch.lane]:
            del lanes[batch.lane]
        if not lanes:
            del self._unanswered[batch.target]
        if not batch.lane.unacked:
            del peer.busy[batch.lane.id]
        self.stir()

    def release_held(self, now_ms: int) -> None:
        """The clock went back to `now_ms`: what was dispatched before was due by then.

        It could wait for as long as the step, and with it all that follows in its lane.
        """
        for peer in self.peers.values():
            for lane in peer.busy.values():
                lane.release_held(now_ms)

    def sendable(
        self, broker: str, now_ms: int, bytes_max: int, ahead_ms: int = 0
    ) -> list[FireBatch]:
        """Batches to put on the wire to a broker now, in one request; at least one if there is any.

        `ahead_ms`: so long before they are due.
        """
        batches: list[FireBatch] = []
        size = 0
        peer = self.peer(broker)
        if not peer.connected or self._fence:
            return batches
        # A batch of each in turn: a lane with many is not in front of the others' next ones.
        lanes = deque(lane for lane in peer.busy.values() if lane.retry_at_ms <= now_ms)
        while lanes and size < bytes_max and len(batches) < BATCHES_MAX:
            lane = lanes.popleft()
            batch = lane.next_to_send(now_ms, ahead_ms)
            if batch is not None:
                lane.sent(batch)
                lanes.append(lane)
                peer.busy[lane.id] = peer.busy.pop(lane.id)
                batches.append(batch)
                size += len(batch.records)
        return batches

    def clock_set(self, by_ms: int) -> None:
        """The machine's clock was set: waits neither end nor grow by that."""
        self.due.clock_set(by_ms)
        for peer in self.peers.values():
            peer.down_since_ms += by_ms if peer.down_since_ms else 0
            for lane in peer.lanes.values():
                lane.retry_at_ms += by_ms if lane.retry_at_ms else 0

    def refusals(self) -> dict[str, str]:
        """Why brokers do not take what they are sent, by topic."""
        lanes = (lane for lane in self.lanes() if lane.failures)
        return {lane.id.topic: lane.reason for lane in lanes}

    def why_not(self, target: TargetId, refusals: Mapping[str, str]) -> str:
        """Why nothing can be sent for a target; empty: as far as is known, it can.

        `refusals`: as they are now.
        """
        if self._fence:
            return self._fence
        if target.topic in self._holds.topics:
            return "the topic is held: see `duemq timer holds`"
        if room_number(target) is not None:
            return "their timer keys are held: see `duemq timer holds`"
        queues = self._routes.get(target.topic, {})
        if not queues:
            return "no broker serves the topic"
        if target.queue_id >= 0 and not queues.get(target.broker):
            return f"broker {target.broker} does not serve the topic"
        if target.queue_id >= 0 and not self.peer(target.broker).connected:
            return f"broker {target.broker} is away"
        if not any(self.peer(name).connected for name in queues):
            return "all brokers of the topic are away"
        return refusals.get(target.topic, "")

    def next_retry_ms(self, broker: str, now_ms: int, ahead_ms: int = 0) -> int:
        """When `sendable`, asked as it was at this `now_ms`, may have something that it held back.

        NEVER: nothing held back.
        """
        waits = (  # of those that were refused there may be thousands: they are not asked
            lane.retry_at_ms if lane.retry_at_ms > now_ms else lane.held_until_ms(ahead_ms)
            for lane in self.peer(broker).busy.values()
        )
        return min((until_ms for until_ms in waits if until_ms > now_ms), default=NEVER)
