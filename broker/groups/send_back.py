"""Send-back: what a group could not process is stored once more, and settled for the group.  Pure.

    a record of a queue ──► again, with its story (retry_record.py) ──► a send-back frame
                                                                        │ timed, in %TIMER%:
                                                                        │   target %RETRY%<group>
                                                                        └ or in %DLQ%<group>

A message and the fact that its group is done with it where it lay must be kept or lost together.
So they are one log entry: the frame says it itself.  Its flag says that it is a send-back, its
topic (or target) for which group, and each record's story where it was sent back from.  `settle`
follows from that, at the append and at a replay.

Owned by: the event loop.  Between the checks and the append nothing else runs: of two send-backs
of one message, however their reads overlap, the second finds it settled.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from duemq.errors import DuemqError, OffsetOutOfRange
from duemq.protocol import checks, names
from duemq.protocol.limits import ATTEMPT_MAX, ERROR_CHARACTERS_MAX
from duemq.protocol.retry_policy import DELAY_MS_MAX, RetryPolicy
from duemq_server.broker.reading.reader import StoredRecord
from duemq_server.broker.records import retry_record, timer_queues
from duemq_server.broker.records.batch import Columns
from duemq_server.broker.records.retry_record import MessagePlace, Story
from duemq_server.broker.store.offsets import GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store

RETRY_QUEUES = 1


class FailedMessage(NamedTuple):
    """A message that a group could not process, and what the group says of it.

    `delay_ms` None: as the group's policy says.  `deliveries` 0: one more than the record knows.
    """

    key: GroupQueue
    offset: int
    generation: int = 0
    delay_ms: int | None = None
    dead_letter: bool = False
    error: str = ""
    deliveries: int = 0
    topic_id: int = 0


class SentBack(NamedTuple):
    """What became of it.  `due_ms` 0: no other delivery, or a duplicate."""

    dead_letter: bool = False
    due_ms: int = 0
    duplicate: bool = False


Outcome = SentBack | DuemqError


class _Again(NamedTuple):
    """A record on its second way into the log.  `at`: the place of its failure."""

    at: int
    failure: FailedMessage
    entry: bytes
    stored: StoredRecord
    due_ms: int


class SendBacks:
    """Takes messages back into the store."""

    def __init__(self, store: Store, broker: str) -> None:
        self._store = store
        self._broker = broker

    def check(self, failure: FailedMessage) -> Queue | None:
        """The queue to read the record from; None: a duplicate.

        Raises InvalidArgument, TopicNotFound, TopicReplaced, QueueNotFound, FencedMember,
        OffsetOutOfRange.
        """
        key = failure.key
        if failure.delay_ms is not None:
            checks.between("delay_ms", failure.delay_ms, 0, DELAY_MS_MAX)
        checks.between("deliveries", failure.deliveries, 0, ATTEMPT_MAX)
        queue = self._store.queue(key.topic, key.queue_id, failure.topic_id)
        self._store.offsets.check_acquired(key, failure.generation)
        if failure.offset >= 0 and self._store.offsets.is_done(key, failure.offset):
            return None
        low, high = queue.min_offset, queue.max_offset
        if not low <= failure.offset < high:
            raise OffsetOutOfRange(
                f"offset: {failure.offset} of topic {key.topic}, queue {key.queue_id}"
                f" is not kept: {low} to {high - 1} are",
                field="offset",
                value=failure.offset,
                limit=f"{low} to {high - 1}",
            )
        return queue

    def store(
        self,
        group: str,
        failures: Sequence[FailedMessage],
        records: Sequence[StoredRecord | DuemqError],
        now_ms: int,
    ) -> tuple[list[Outcome], int]:
        """(Outcomes in order, settled).  `records`: what was read for each failure.

        What goes the same way is one frame.  An error is one message's own, or of all that would
        have been in its frame; then nothing of that is stored.
        """
        outcomes: list[Outcome] = []
        retries: list[_Again] = []
        dead: list[_Again] = []
        taken: Counter[GroupQueue] = Counter()
        places: set[tuple[GroupQueue, int]] = set()
        policy = self._store.groups.effective(group).retry
        for at, (failure, record) in enumerate(zip(failures, records, strict=True)):
            place = (failure.key, failure.offset)
            try:
                if place in places or self.check(failure) is None:
                    outcomes.append(SentBack(duplicate=True))
                    continue
                if isinstance(record, DuemqError):
                    raise record
                self._store.offsets.check_settled_room(failure.key, taken[failure.key] + 1)
                again, sent_back = self._again(at, failure, record, policy, now_ms)
            except DuemqError as error:
                outcomes.append(error)
                continue
            places.add(place)
            taken[failure.key] += 1
            outcomes.append(sent_back)
            (dead if sent_back.dead_letter else retries).append(again)
        settled = 0
        for ways, append in ((retries, self._append_retries), (dead, self._append_dead)):
            if not ways:
                continue
            try:
                settled = max(settled, append(group, ways, now_ms))
            except DuemqError as error:
                for each in ways:
                    outcomes[each.at] = error
        if any(isinstance(outcome, SentBack) and outcome.duplicate for outcome in outcomes):
            # What settled them may still be on its way to the disk.
            settled = self._store.log.end_position
        return outcomes, settled

    def _again(
        self,
        at: int,
        failure: FailedMessage,
        stored: StoredRecord,
        policy: RetryPolicy,
        now_ms: int,
    ) -> tuple[_Again, SentBack]:
        """The record as it is stored anew, and where it goes.  Raises Corrupt."""
        group, topic, queue_id = failure.key
        record = retry_record.content(stored.entry)
        source = MessagePlace(topic, self._broker, queue_id, failure.offset)
        # Only what this group sent back before has a story here; a producer may write anything.
        attempt, before = 0, None
        if topic == names.retry_topic(group):
            attempt, before = retry_record.read(record)
            if before and before.group != group:
                before = None
        attempt = min(max(failure.deliveries, attempt + 1), ATTEMPT_MAX)
        story = Story(
            group,
            origin=before.origin if before else source,
            first_failed_ms=before.first_failed_ms if before else now_ms,
            last_failed_ms=now_ms,
            error=failure.error[:ERROR_CHARACTERS_MAX],
            source=source,
        )
        entry = retry_record.rewritten(record, attempt, story)
        if failure.dead_letter or attempt > (policy.retries_max or 0):
            return _Again(at, failure, entry, stored, 0), SentBack(dead_letter=True)
        delay_ms = policy.delay_ms(attempt) if failure.delay_ms is None else failure.delay_ms
        due_ms = now_ms + delay_ms
        return _Again(at, failure, entry, stored, due_ms), SentBack(due_ms=due_ms)

    def _append_retries(self, group: str, retries: list[_Again], now_ms: int) -> int:
        topic = self._topic(names.retry_topic(group))
        queues = self._store.queues_of(names.TIMER_TOPIC)
        latest_ms = max(each.due_ms for each in retries)
        queue = queues[timer_queues.unordered(topic, len(queues), latest_ms, now_ms)]
        due_ms = struct.pack(f"<{len(retries)}q", *(each.due_ms for each in retries))
        accepted = self._store.append_frame(
            queue, _columns(retries), now_ms, target=(topic, 0), due_ms=due_ms, send_back=True
        )
        self._settle(retries)
        self._store.tables.count_retries(group, len(retries))
        self._store.sent_back.add(group, len(retries))
        return accepted.settled

    def _append_dead(self, group: str, dead: list[_Again], now_ms: int) -> int:
        queue = self._store.queues_of(self._topic(names.dead_letter_topic(group)))[0]
        accepted = self._store.append_frame(queue, _columns(dead), now_ms, send_back=True)
        self._settle(dead)
        self._store.dead_letters.add(group, len(dead))
        return accepted.settled

    def _topic(self, name: str) -> str:
        """The group's topic of that name, made if it is not there: routes carry it from now on."""
        self._store.check_writable()
        if name not in self._store.topics:
            self._store.create_topic(name, RETRY_QUEUES)
        return name

    def _settle(self, stored: list[_Again]) -> None:
        for each in stored:
            self._store.offsets.settle(each.failure.key, [each.failure.offset])


def _columns(records: list[_Again]) -> Columns:
    count = len(records)
    pack = struct.Struct(f"<{count}I").pack
    return Columns(
        count,
        b"".join([each.entry for each in records]),
        pack(*(len(each.entry) for each in records)),
        pack(*(each.stored.tag_hash for each in records)),
        pack(*(each.stored.key_hash for each in records)),
    )
