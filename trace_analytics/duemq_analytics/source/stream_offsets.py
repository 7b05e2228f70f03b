"""How far a stream has read: offsets between two micro-batches.  Pure.

Spark keeps them as JSON in the query's checkpoint and compares the text, so a map has one form
only: brokers and queues in order.  As in

    {"broker-0": {"topic_id": 7, "queues": {"0": 120, "1": 98}}}

with the offset of each queue that is read next.  A topic that was deleted and made anew has another
`topic_id`: its offsets are not the old ones' continuation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from duemq.errors import OffsetOutOfRange, TopicReplaced
from duemq_analytics.options import Options
from duemq_analytics.source import plan
from duemq_analytics.source.plan import QueueBounds, QueueRange

Offsets = dict[str, dict[str, Any]]
"""The form above."""

Queue = tuple[str, int]
"""Broker and queue of it."""

_logger = logging.getLogger(__name__)


def canonical(ends: Mapping[Queue, int], topic_ids: Mapping[str, int]) -> Offsets:
    """The one form of these offsets."""
    found: Offsets = {}
    for broker, queue in sorted(ends):
        of_broker = found.setdefault(broker, {"topic_id": topic_ids.get(broker, 0), "queues": {}})
        of_broker["queues"][str(queue)] = ends[broker, queue]
    return found


def initial(queues: Sequence[QueueBounds], options: Options) -> Offsets:
    """Where a new query begins."""
    return canonical(plan.starts(queues, options), _topic_ids(queues))


def latest(
    start: Offsets, queues: Sequence[QueueBounds], limit: int | None, options: Options
) -> Offsets:
    """How far the next micro-batch goes: to the end, or with `limit` messages at most.

    Each queue gets the same share of `limit`, and what short queues leave goes to the longer ones:
    no queue waits for another's backlog, whatever their lengths.  A queue that is new begins at its
    first offset; one that is not there now (its broker is away) stays where it is, unless its topic
    was made anew: an offset of the old one would be taken for one of the new one's.
    """
    begun = _begun(start, queues, options)
    past = {_of(queue): queue.past for queue in queues}
    taken = fair_shares({key: past[key] - at for key, at in begun.items() if key in past}, limit)
    anew = {each.broker for each in queues if each.broker in start and _replaced(start, each)}
    ends = {
        key: at + taken.get(key, 0)
        for key, at in begun.items()
        if key in past or key[0] not in anew
    }
    known = {broker: of_broker["topic_id"] for broker, of_broker in start.items()}
    return canonical(ends, known | _topic_ids(queues))


def fair_shares(waiting: Mapping[Queue, int], limit: int | None) -> dict[Queue, int]:
    """How many messages to take of each queue, at most `limit` in all.

    Where that is less than one for each, the longest queues get one: each is among them in time.
    """
    shares = dict.fromkeys(waiting, 0)
    order = sorted(waiting, key=lambda key: (waiting[key], key))  # the shortest first
    if limit is not None:
        order = order[-limit:]
    left, queues = limit, len(order)
    for key in order:
        count = max(waiting[key], 0)
        if left is not None:
            count = min(count, left // queues)
            left -= count
        shares[key] = count
        queues -= 1
    return shares


def between(
    start: Offsets, end: Offsets, queues: Sequence[QueueBounds], options: Options
) -> list[QueueRange]:
    """The ranges of a micro-batch, the same at every repetition."""
    begun = _begun(start, queues, options)
    found = []
    for bounds in sorted(queues, key=_of):
        at, until = begun[_of(bounds)], offset_of(end, _of(bounds))
        if until is None or at >= until:
            continue
        if _replaced(end, bounds):  # since it was planned: nothing of that is there
            lost(until, bounds, options, replaced=True)
            continue
        found.append(bounds.between(at, until))
    _require_all(start, end, {_of(bounds) for bounds in queues}, options)
    return found


def planned(start: Offsets, end: Offsets) -> dict[Queue, tuple[int, int]]:
    """Queues that a micro-batch has something to read of: from where to where."""
    ranges = {key: (offset_of(start, key) or 0, offset_of(end, key) or 0) for key in keys_of(end)}
    return {key: (at, until) for key, (at, until) in ranges.items() if at < until}


def offset_of(offsets: Offsets, queue: Queue) -> int | None:
    """Of a queue; None: not among them."""
    broker, number = queue
    offset: int | None = offsets.get(broker, {}).get("queues", {}).get(str(number))
    return offset


def keys_of(offsets: Offsets) -> list[Queue]:
    """The queues named."""
    return [(broker, int(q)) for broker, each in offsets.items() for q in each["queues"]]


def lost(offset: int, bounds: QueueBounds, options: Options, *, replaced: bool) -> None:
    """Raises OffsetOutOfRange or TopicReplaced, or warns where data may be lost."""
    place = f"{options.topic}/{bounds.queue} on broker {bounds.broker!r}"
    if replaced:
        said = f"{place}: the topic was deleted and made anew since offset {offset} was read"
    else:
        said = f"{place}: offset {offset} does not exist; there are {bounds.first} to {bounds.past}"
    if options.fail_on_data_loss:
        error = TopicReplaced if replaced else OffsetOutOfRange
        raise error(
            f"{said} (failOnDataLoss=false goes on with those that are there)",
            field="offset",
            value=offset,
            limit=f"{bounds.first}..{bounds.past}",
        )
    _logger.warning("%s", said)


def _begun(start: Offsets, queues: Sequence[QueueBounds], options: Options) -> dict[Queue, int]:
    """Where each queue is, known ones and new ones."""
    begun = {key: offset_of(start, key) or 0 for key in keys_of(start)}
    for bounds in queues:
        at = offset_of(start, _of(bounds))
        begun[_of(bounds)] = bounds.first if at is None else _checked(start, at, bounds, options)
    return begun


def _checked(start: Offsets, at: int, bounds: QueueBounds, options: Options) -> int:
    """`at` if its records are there; what is gone fails the stream or, allowed, is passed over."""
    replaced = _replaced(start, bounds)
    if not replaced and bounds.first <= at <= bounds.past:
        return at
    lost(at, bounds, options, replaced=replaced)
    return bounds.first if replaced or at < bounds.first else bounds.past


def _replaced(offsets: Offsets, bounds: QueueBounds) -> bool:
    """Whether they are of an earlier topic of this name than the one that is there."""
    known = offsets[bounds.broker]["topic_id"]
    return bool(known and bounds.topic_id and known != bounds.topic_id)


def _require_all(start: Offsets, end: Offsets, there: Collection[Queue], options: Options) -> None:
    """Raises OffsetOutOfRange where a queue with something to read is not there now, or warns.

    Of one that is new nobody can tell any more where it began.
    """
    for (broker, queue), (at, until) in planned(start, end).items():
        if (broker, queue) in there:
            continue
        said = f"{options.topic}/{queue} on broker {broker!r} is not there: {at} to {until}"
        if options.fail_on_data_loss:
            raise OffsetOutOfRange(
                f"{said} (failOnDataLoss=false passes over them)",
                field="queue",
                value=queue,
                limit=until,
            )
        starting = json.dumps({broker: {str(queue): at}})
        _logger.warning(
            "%s are passed over; if it comes back, a batch read has them: startingOffsets %s",
            said,
            starting,
        )


def _of(bounds: QueueBounds) -> Queue:
    return bounds.broker, bounds.queue


def _topic_ids(queues: Sequence[QueueBounds]) -> dict[str, int]:
    return {queue.broker: queue.topic_id for queue in queues}
