"""Which offsets a read takes, and how they are cut into partitions.  Pure.

A partition is a range of one queue on one broker: queues of two brokers have equal numbers.
Which offsets exist is asked once per DataFrame, so that a DataFrame is a snapshot.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from duemq.errors import InvalidArgument, MissingBroker, OffsetOutOfRange, PartialAnswer
from duemq_analytics.options import EARLIEST, LATEST, Options, Positions

PARTITIONS_MAX = 10_000
"""Tasks of one read; Spark's driver keeps about 1 KB for each."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QueueBounds:
    """A queue as its broker describes it: offsets from `first` to `past` - 1 exist."""

    broker: str
    address: str
    queue: int
    first: int
    past: int
    topic_id: int = 0
    """Of which topic of this name the offsets are; 0: not known (an older broker)."""
    store_id: int = 0
    """Of the broker: another one may be at its address; 0: not known (an older nameserver)."""

    def between(self, start: int, end: int) -> QueueRange:
        """Some of its offsets."""
        return QueueRange(
            self.broker, self.address, self.queue, start, end, self.topic_id, self.store_id
        )


@dataclass(frozen=True)
class QueueRange:
    """Offsets `start` to `end` - 1 of a queue."""

    broker: str
    address: str
    queue: int
    start: int
    end: int
    topic_id: int = 0
    """As in QueueBounds."""
    store_id: int = 0
    """As in QueueBounds."""


def require_whole(
    lost: Sequence[MissingBroker],
    options: Options,
    *,
    served: bool,
    planned: Collection[str] = (),
) -> None:
    """Raises PartialAnswer where a broker is lost: what it has of the topic is not there to read.

    With `failOnDataLoss=false` only warns, if somebody serves the topic: else all who do may be
    away, and nothing says that it was deleted.  Nor is a broker left out whose messages a
    micro-batch was `planned` to have: the next one begins behind them.
    """
    if not lost:
        return
    may_be_left_out = served and not any(each.name in planned for each in lost)
    named = "; ".join(f"{each.name}: {each.error}" for each in lost)
    message = (
        f"topic {options.topic!r} cannot be read whole: a broker is lost that may have messages of"
        f" it ({named})"
    )
    if options.fail_on_data_loss or not may_be_left_out:
        raise PartialAnswer(
            f"{message}; wait until it is back, or give it up (duemq cluster forget)"
            + (", or read the others' (failOnDataLoss=false)" if may_be_left_out else ""),
            missing=lost,
            field="broker",
            value=", ".join(each.name for each in lost),
        )
    _logger.warning("%s: it is left out", message)


def ranges(queues: Sequence[QueueBounds], options: Options) -> list[QueueRange]:
    """The range to read of each queue; raises OffsetOutOfRange where offsets are gone.

    Queues that a JSON of offsets does not name are read from the earliest to the latest.
    """
    _require_known("startingOffsets", options.starting, queues, options)
    _require_known("endingOffsets", options.ending, queues, options)
    found = []
    for queue in sorted(queues, key=lambda bounds: (bounds.broker, bounds.queue)):
        start = _resolve("startingOffsets", options.starting, EARLIEST, queue, options)
        end = _resolve("endingOffsets", options.ending, LATEST, queue, options)
        if start < end:
            found.append(queue.between(start, end))
    return found


def starts(queues: Sequence[QueueBounds], options: Options) -> dict[tuple[str, int], int]:
    """Where reading begins, of each queue; raises OffsetOutOfRange where offsets are gone.

    A broker that may be away keeps the places that it was given: it may come back.
    """
    _require_known("startingOffsets", options.starting, queues, options)
    named = {} if isinstance(options.starting, str) else options.starting
    found = {
        (broker, queue): offset
        for broker, offsets in named.items()
        for queue, offset in offsets.items()
        if isinstance(offset, int)
    }
    return found | {
        (queue.broker, queue.queue): _resolve(
            "startingOffsets", options.starting, EARLIEST, queue, options
        )
        for queue in queues
    }


def first_since(queue: QueueBounds, since_ms: int, store_ms_of: Callable[[int], int]) -> int:
    """The first offset of what was stored then or later (Unix ms); `past` if nothing was.

    `store_ms_of`: of an offset that is there; a queue's store times do not fall.
    """
    offsets = range(queue.first, queue.past)
    return queue.first + bisect_left(offsets, since_ms, key=store_ms_of)


def partitions(found: Iterable[QueueRange], records_max: int) -> list[QueueRange]:
    """The ranges, cut into nearly equal pieces of at most `records_max` offsets."""
    pieces: list[QueueRange] = []
    for whole in found:
        count = whole.end - whole.start
        parts = -(-count // records_max)
        if len(pieces) + parts > PARTITIONS_MAX:
            raise InvalidArgument(
                f"option maxRecordsPerPartition: {records_max:,} makes more than "
                f"{PARTITIONS_MAX:,} partitions; take a larger one",
                field="maxRecordsPerPartition",
                value=records_max,
                limit=PARTITIONS_MAX,
            )
        cuts = [whole.start + count * i // parts for i in range(parts + 1)]
        pieces += [replace(whole, start=start, end=end) for start, end in itertools.pairwise(cuts)]
    return pieces


def _require_known(
    name: str, positions: Positions, queues: Sequence[QueueBounds], options: Options
) -> None:
    """Of a broker that is not there, with `failOnDataLoss=false` only warns."""
    if isinstance(positions, str):
        return
    known = {(queue.broker, queue.queue) for queue in queues}
    brokers = {queue.broker for queue in queues}
    for broker, offsets in positions.items():
        if broker not in brokers and not options.fail_on_data_loss:
            _logger.warning("option %s: broker %r is not there: it is left out", name, broker)
            continue
        for queue in offsets:
            if (broker, queue) not in known:
                raise InvalidArgument(
                    f"option {name}: the topic has no queue {queue} on broker {broker!r}"
                    + ("" if broker in brokers else " (failOnDataLoss=false reads the others)"),
                    field=name,
                    value=f"{broker}/{queue}",
                    limit=", ".join(f"{b}/{q}" for b, q in sorted(known)[:20]),
                )


def _resolve(
    name: str, positions: Positions, default: str, queue: QueueBounds, options: Options
) -> int:
    if isinstance(positions, str):
        offset: int | str = positions
    else:
        offset = positions.get(queue.broker, {}).get(queue.queue, default)
    if isinstance(offset, str):
        return queue.first if offset == EARLIEST else queue.past
    if queue.first <= offset <= queue.past:
        return offset
    message = (
        f"option {name}: offset {offset} of queue {queue.queue} on broker {queue.broker!r} does "
        f"not exist; there are {queue.first} to {queue.past} (failOnDataLoss=false reads those)"
    )
    if options.fail_on_data_loss:
        raise OffsetOutOfRange(
            message, field=name, value=offset, limit=f"{queue.first}..{queue.past}"
        )
    _logger.warning("%s", message)
    return min(max(offset, queue.first), queue.past)
