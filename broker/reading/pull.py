"""One pull: what it reads, how far it has looked, and what it may still be given.  Pure.

A pull is answered once.  A standing pull has a credit: it is answered again and again, each time
from where the last answer ended, until the credit is used up or something ends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from duemq.protocol import checks, names
from duemq.protocol.limits import PULL_BYTES_MAX, PULL_RECORDS_MAX, PULL_WAIT_MS_MAX
from duemq_server.broker.filtering.filters import Expressions, Filter
from duemq_server.broker.reading.waiters import QueueKey
from duemq_server.broker.store.queues import Queue

if TYPE_CHECKING:
    from duemq.v1 import broker_pb2

QUEUES_MAX = 1_024
RECORDS_DEFAULT = 4_096
BYTES_DEFAULT = 1 << 20
CREDIT_RECORDS_MAX, CREDIT_BYTES_MAX = 65_536, 1 << 40


@dataclass(slots=True)
class QueueRead:
    """One queue of a pull."""

    topic: str
    queue_id: int
    offset: int
    """Up to where the client has been told."""
    generation: int
    wanted: Filter
    scanned: int
    """Up to where the pull has looked."""
    topic_id: int
    """Of which topic of this name; 0: of whichever is there."""
    queue: Queue | None = None
    """As of the last look at it."""

    @property
    def key(self) -> QueueKey:
        """Of the queue.  Its own, where it is known: thousands of pulls may wait with it."""
        return (self.topic, self.queue_id) if self.queue is None else self.queue.key

    @property
    def has_more(self) -> bool:
        """There is something to read, or an error to find."""
        queue = self.queue
        return queue is None or queue.dropped or self.scanned != queue.max_offset


@dataclass(slots=True)
class Pull:
    """A request between its coming and its last answer."""

    group: str
    reads: list[QueueRead]
    wait_ms: int
    records_max: int
    """Of one answer, as the next."""
    bytes_max: int
    standing: bool
    credit_records: int
    """Of all answers that are to come, as the next."""
    credit_bytes: int
    turn: int = 0
    """Says which queue the next answer begins with.  Its own, as others' turns come in between."""
    was_parked: bool = False
    ended: bool = False
    """The next answer is the last one."""

    @property
    def records_next(self) -> int:
        """Records that the next answer may have."""
        return min(self.records_max, self.credit_records)

    @property
    def bytes_next(self) -> int:
        """Bytes that the next answer may have."""
        return min(self.bytes_max, self.credit_bytes)

    def give(self, records: int, size: int) -> None:
        """An answer gave so much of the credit away."""
        if self.standing:
            self.credit_records -= records
            self.credit_bytes -= size
        if not self.standing or self.credit_records <= 0 or self.credit_bytes <= 0:
            self.ended = True

    def extend(self, request: broker_pb2.PullRequest) -> None:
        """Raises the credit.  Raises InvalidArgument for less than nothing, or too much."""
        _check_credit(request)
        records = self.credit_records + request.credit_records
        size = self.credit_bytes + request.credit_bytes
        checks.between("credit_records", records, 0, CREDIT_RECORDS_MAX)
        checks.between("credit_bytes", size, 0, CREDIT_BYTES_MAX)
        self.credit_records, self.credit_bytes = records, size


def parse(request: broker_pb2.PullRequest, expressions: Expressions | None = None) -> Pull:
    """Raises InvalidArgument.  `expressions`: those of the request that are compiled."""
    checks.between("wait_ms", request.wait_ms, 0, PULL_WAIT_MS_MAX)
    checks.between("max_records", request.max_records, 0, PULL_RECORDS_MAX)
    checks.between("max_bytes", request.max_bytes, 0, PULL_BYTES_MAX)
    _check_credit(request)
    return Pull(
        request.group,
        _reads(request, expressions or Expressions()),
        request.wait_ms,
        request.max_records or RECORDS_DEFAULT,
        request.max_bytes or BYTES_DEFAULT,
        request.credit_records > 0,
        request.credit_records or PULL_RECORDS_MAX,
        request.credit_bytes or CREDIT_BYTES_MAX,
    )


def _reads(request: broker_pb2.PullRequest, expressions: Expressions) -> list[QueueRead]:
    checks.count("queues", len(request.queues), 1, QUEUES_MAX, "in a pull")
    if request.group:
        names.check_group(request.group)
    topics: dict[str, str] = {}  # a text once, however many queues it is of
    return [
        QueueRead(
            topics.setdefault(pull.topic, pull.topic),
            pull.queue_id,
            offset := pull.offset,
            pull.generation,
            expressions.parse(pull.filter, pull.filter_type),
            offset,
            pull.topic_id,
        )
        for pull in request.queues
    ]


def _check_credit(request: broker_pb2.PullRequest) -> None:
    checks.between("credit_records", request.credit_records, 0, CREDIT_RECORDS_MAX)
    checks.between("credit_bytes", request.credit_bytes, 0, CREDIT_BYTES_MAX)
