"""What producers have sent: the memory that makes a repeated send harmless.  Pure.

Owned by: Tables.  Mutated by: the event loop.

A producer numbers its batches per *lane*: (producer id, topic, queue id as requested, timed or
not).  We keep each lane's epoch, next sequence and the answers to the last `WINDOW_BATCHES`.

    epoch    lower than the lane's   FENCED_PRODUCER: a newer instance has taken over
             higher                  the lane starts again at the given sequence
    sequence the next one            stored
             lower, in the window    a repeat: the first answer is given again
             lower, before it        OUT_OF_SEQUENCE: stored, but its offsets are no longer known
             higher                  OUT_OF_SEQUENCE: one before it is missing
    lane unknown                     any sequence begins it

What was stored is found before anything else may refuse a batch.  A refused batch changes nothing.
The table is in the checkpoint and is rebuilt from the log's frames beyond it.

Who follows a log forgets nothing for its age: its lanes are those of the leader, in the same order,
behind some that the leader has forgotten.  So in a full table, where a new lane puts out the one
that was idle longest, it never puts out one that the leader still has.

Lanes idle for
`idle_ms` are forgotten, except those of timer services that have claimed queues here
(timer_owners.py): a shard may be away for as long as it likes.  Theirs lie apart and do not count:
there is one a queue that the service ever fired to, and it goes with the topic, or when another
service has taken over.  A service has few batches unanswered, so its windows are short.

Checkpoint encoding, little-endian, lane after lane:

off size field
0   8    producer_id         8  2  topic_length      10  1  timed       11  1  window entries
12  4    queue_id (i32)     16  4  epoch             20  8  next sequence
28  n    topic utf-8, then per window entry, oldest first:
         8 position  8 base_offset  8 store_ms  4 queue_id (i32)  4 records
"""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from duemq.errors import FencedProducer, InvalidArgument, OutOfSequence, Overloaded
from duemq.protocol import checks
from duemq.protocol.limits import SEQUENCE_MAX, WINDOW_BATCHES

# More than a timer service has unanswered in a lane.
SERVICE_WINDOW_BATCHES = 8
LANES_MAX = 50_000
# A lane may be put out for a new one after this long without a batch when the table is full.
EVICT_IDLE_MS = 60_000

_LANE = struct.Struct("<QHBBiIQ")
_STORED = struct.Struct("<QQQiI")
assert _LANE.size == 28
assert _STORED.size == 32


class LaneKey(NamedTuple):
    """What one sequence of numbers belongs to."""

    producer_id: int
    topic: str
    queue_id: int
    timed: bool


class StoredPlace(NamedTuple):
    """Where a batch lies: the answer to its sender, and to the sender's repeats."""

    position: int
    base_offset: int
    store_ms: int
    queue_id: int
    records: int


class ProducerLane(NamedTuple):
    """One lane, as of one batch.  The window's last entry is that of `next_sequence - 1`.

    A value: a checkpoint that holds it is the same whatever is sent meanwhile.  The window is kept
    packed, as it lies in the checkpoint: 2 KiB a lane, and nothing to collect.
    """

    epoch: int
    next_sequence: int
    window: bytes = b""
    used_at_ms: int = 0
    """By the broker's uptime."""

    @property
    def known(self) -> int:
        """Batches whose answers are known."""
        return len(self.window) // _STORED.size

    def stored(self, back: int) -> StoredPlace:
        """The answer to the last batch (1), the one before (2), and so on."""
        return StoredPlace(
            *_STORED.unpack_from(self.window, len(self.window) - back * _STORED.size)
        )

    def after(self, stored: StoredPlace, window_batches: int, used_at_ms: int) -> "ProducerLane":
        """When the next batch was stored."""
        kept = self.window[-(window_batches - 1) * _STORED.size :]
        window = kept + _STORED.pack(*stored)
        return ProducerLane(self.epoch, self.next_sequence + 1, window, used_at_ms)

    def without_last(self) -> "ProducerLane":
        """When the last batch was not stored after all."""
        window = self.window[: -_STORED.size]
        return self._replace(next_sequence=self.next_sequence - 1, window=window)


class Producers:
    """The lanes of all producers of this broker."""

    def __init__(self, idle_ms: int, lanes_max: int = LANES_MAX) -> None:
        self._idle_ms = idle_ms
        self._lanes_max = lanes_max
        # In the order of last use.
        self._lanes: dict[LaneKey, ProducerLane] = {}
        self._uptime_ms = 0
        self._services: dict[int, dict[LaneKey, ProducerLane]] = {}  # by id

    def __len__(self) -> int:
        return len(self._lanes) + sum(map(len, self._services.values()))

    def _table(self, key: LaneKey) -> dict[LaneKey, ProducerLane]:
        return self._services.get(key.producer_id, self._lanes)

    def trust_service(self, service_id: int) -> None:
        """Lanes of a timer service are kept until `forget_service`."""
        if service_id not in self._services:
            mine = {key: lane for key, lane in self._lanes.items() if key.producer_id == service_id}
            self._services[service_id] = mine
            for key in mine:
                del self._lanes[key]

    def forget_service(self, service_id: int) -> None:
        """Another timer service has taken over: this one is not listened to any more."""
        self._services.pop(service_id, None)

    def find(self, key: LaneKey, epoch: int, sequence: int) -> StoredPlace | None:
        """The answer that this batch was given before; None: it is not stored.

        To be asked before anything else may refuse the batch: its sender takes a refusal for "not
        stored".  Raises FencedProducer, and OutOfSequence where the answer is no longer known.
        """
        lane = self._table(key).get(key)
        if lane is None or epoch > lane.epoch:
            return None
        if epoch < lane.epoch:
            raise FencedProducer(
                f"producer_epoch: {epoch} was replaced by {lane.epoch}",
                field="producer_epoch",
                value=epoch,
                limit=lane.epoch,
            )
        back = lane.next_sequence - sequence
        if back <= 0:
            return None
        if back > lane.known:
            raise OutOfSequence(
                f"sequence: {sequence} was stored, but its offsets are no longer known;"
                f" the last {lane.known} batches before {lane.next_sequence} are",
                field="sequence",
                value=sequence,
                limit=lane.next_sequence - lane.known,
            )
        return lane.stored(back)

    def check_next(self, key: LaneKey, epoch: int, sequence: int) -> None:
        """Whether a batch that `find` does not know may be stored now.

        Raises OutOfSequence when one before it is missing, and Overloaded when there is no room
        for a new lane.
        """
        table = self._table(key)
        lane = table.get(key)
        if lane is None:
            if table is self._lanes:
                self._check_room()
        elif epoch == lane.epoch and sequence > lane.next_sequence:
            raise OutOfSequence(
                f"sequence: {sequence} came, {lane.next_sequence} is next"
                f" for topic {key.topic}, queue {key.queue_id}",
                field="sequence",
                value=sequence,
                limit=lane.next_sequence,
            )

    def record(self, key: LaneKey, epoch: int, sequence: int, stored: StoredPlace) -> None:
        """The batch was appended (or is found in the log during recovery)."""
        table = self._table(key)
        lane = table.pop(key, None)
        ordinary = table is self._lanes
        if lane is None and ordinary and len(table) >= self._lanes_max:
            del table[next(iter(table))]  # the longest idle, as `check_next` found, here or there
        if lane is None or lane.epoch != epoch or lane.next_sequence != sequence:
            lane = ProducerLane(epoch, sequence)
        window_batches = WINDOW_BATCHES if ordinary else SERVICE_WINDOW_BATCHES
        table[key] = lane.after(stored, window_batches, self._uptime_ms)

    def forget_topic(self, topic: str) -> None:
        """The topic is deleted: its offsets mean nothing any more.

        What was timed lies in %TIMER%, and a repeat of it is one as before.
        """
        for table in (self._lanes, *self._services.values()):
            for key in [key for key in table if key.topic == topic and not key.timed]:
                del table[key]

    def age(self, elapsed_ms: int) -> int:
        """So much time has passed since the last call: forgets what was idle too long; how many.

        Of a clock that nobody sets: one that is a year ahead for a moment must forget nothing.
        """
        self._uptime_ms += elapsed_ms
        idle: list[LaneKey] = []
        for key, lane in self._lanes.items():
            if self._uptime_ms - lane.used_at_ms <= self._idle_ms:
                break
            idle.append(key)
        for key in idle:
            del self._lanes[key]
        return len(idle)

    def forget_beyond(self, end: int) -> None:
        """The log has lost what lay from `end` on: those batches were never stored."""
        for table in (self._lanes, *self._services.values()):
            for key, lane in list(table.items()):
                kept = lane
                while kept.known and kept.stored(1).position >= end:
                    kept = kept.without_last()
                if kept.known:
                    table[key] = kept
                else:
                    del table[key]

    def idle_as_logged(self, store_ms: int) -> None:
        """Lanes were idle for as long as the log says, which is at `store_ms`; up to a bound.

        For who followed a log, and had no time of its own.  A clock that was wrong forgets nothing.
        """
        for key, lane in self._lanes.items():
            idle_ms = store_ms - lane.stored(1).store_ms if lane.known else EVICT_IDLE_MS
            used_at_ms = self._uptime_ms - min(max(idle_ms, 0), EVICT_IDLE_MS)
            self._lanes[key] = lane._replace(used_at_ms=used_at_ms)

    def _longest_idle(self) -> LaneKey | None:
        """The lane that may be put out for a new one."""
        for key, lane in self._lanes.items():
            if self._uptime_ms - lane.used_at_ms < EVICT_IDLE_MS:
                break
            return key
        return None

    def _check_room(self) -> None:
        if len(self._lanes) < self._lanes_max or self._longest_idle() is not None:
            return
        raise Overloaded(
            f"producer_id: {len(self._lanes)} lanes of producers are active, the most allowed",
            field="producer_id",
            value=len(self._lanes),
            limit=self._lanes_max,
        )

    def freeze(self) -> Callable[[], bytes]:
        """What makes its part of the checkpoint, as of now; any thread may call it."""
        frozen = [dict(table) for table in (self._lanes, *self._services.values())]
        return lambda: b"".join(
            part for table in frozen for item in table.items() for part in _pack(*item)
        )

    def load(self, data: bytes) -> None:
        """Puts back what `freeze` gave; services are trusted before.

        How long they were idle is not known: they may be put out for new ones at once, the longest
        idle first, and are forgotten as if they had been used just now.
        """
        for key, lane in _unpack(data):
            self._table(key)[key] = lane


def _pack(key: LaneKey, lane: ProducerLane) -> tuple[bytes, bytes, bytes]:
    topic = key.topic.encode()
    head = _LANE.pack(
        key.producer_id,
        len(topic),
        key.timed,
        lane.known,
        key.queue_id,
        lane.epoch,
        lane.next_sequence,
    )
    return head, topic, lane.window


def _unpack(data: bytes) -> Iterator[tuple[LaneKey, ProducerLane]]:
    at = 0
    while at < len(data):
        fields = _LANE.unpack_from(data, at)
        producer_id, topic_length, timed, entries, queue_id, epoch, next_sequence = fields
        at += _LANE.size
        topic = data[at : at + topic_length].decode()
        at += topic_length
        end = at + entries * _STORED.size
        key = LaneKey(producer_id, topic, queue_id, bool(timed))
        yield key, ProducerLane(epoch, next_sequence, data[at:end], -EVICT_IDLE_MS)
        at = end


def check_identity(producer_id: int, epoch: int, sequence: int) -> None:
    """Raises InvalidArgument for an epoch or sequence without a producer, or the last sequence."""
    if sequence > SEQUENCE_MAX:
        raise checks.wrong(
            "sequence",
            sequence,
            f"0 to {SEQUENCE_MAX}: it has no successor; raise producer_epoch and number anew",
        )
    if not producer_id and (epoch or sequence):
        raise InvalidArgument(
            "producer_id: 0 means not idempotent, but an epoch or sequence is given",
            field="producer_id",
            value=0,
            limit="an id with producer_epoch and sequence, or none of the three",
        )
