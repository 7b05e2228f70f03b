"""What a shard knows of timers under keys beside them, and how a SCHEDULE entry changes all.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.scheduling.keyed.ended_keys import EndedKeys
from duemq_server.timer_service.scheduling.keyed.request_memory import RequestMemory
from duemq_server.timer_service.timers import intake
from duemq_server.timer_service.timers.keyed_entry import Changed
from duemq_server.timer_service.timers.keys import NOWHERE
from duemq_server.timer_service.timers.log_entries import (
    Cancelled,
    CancelledTable,
    SourceId,
    TargetId,
)
from duemq_server.timer_service.timers.rows import Blob, Home, keys_of
from duemq_server.timer_service.timers.wheel import Ids

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler

NO_SOURCE = SourceId(0, 0)


class KeyedState:
    """Timers that did not come from a broker: their source, their requests, their ends."""

    def __init__(self, requests_max: int, request_bytes_max: int) -> None:
        self.source = NO_SOURCE
        """Of the timers that come from now on: the shard's id and number."""
        self.formers: frozenset[SourceId] = frozenset()
        """Before the shard's replicas accepted a loss: what did not arrive then never will."""
        self.requests = RequestMemory(requests_max, request_bytes_max)
        self.ended = EndedKeys()

    def is_own(self, source: SourceId) -> bool:
        """Whether timers of the source come from here, and not from a broker."""
        return source == self.source or source in self.formers

    def expire(self, now_ms: int, keep_ms: int) -> None:
        """Forgets what is past its time."""
        self.requests.expire(now_ms)
        self.ended.expire(now_ms - keep_ms)


def apply(
    scheduler: Scheduler,
    changed: Changed,
    home: int,
    now_ms: int,
    rows: Ids | None = None,
    topics: Sequence[str] | None = None,
) -> None:
    """Timers of a SCHEDULE entry go and come; its frames lie at `home` of the log.

    `rows`: where those that go lie in the near table, NOWHERE: not there; None: not known.
    `topics`: of each that goes, or of all if there is one; None: as far as the log tells.
    """
    gone = [*changed.cancelled, *changed.replaced]
    if changed.table is not None:
        _replace_all(scheduler, changed.table, rows, now_ms, topics)
    elif gone:
        named = topics or changed.topics or [0] * len(gone)
        _take_away(scheduler, gone, named, len(changed.cancelled), rows, now_ms)
    if changed.fired:
        _note_fired(scheduler, changed.replaced, now_ms)
    keyed = scheduler.keyed
    keyed.ended.note(changed.cancelled_hashes.tolist(), changed.at_ms, fired=False)
    keyed.ended.forget(changed.hashes[changed.hashes != 0].tolist())
    keyed.requests.add(changed.request, changed.answer, changed.at_ms)
    if changed.brokers:
        _bring_in(scheduler, changed, home, now_ms)


def _replace_all(
    scheduler: Scheduler,
    table: CancelledTable,
    rows: Ids | None,
    now_ms: int,
    topics: Sequence[str] | None,
) -> None:
    """As `_take_away`, a column at a time."""
    keys = keys_of(number_sources(scheduler, table), table["offset"])
    if rows is None:
        rows = scheduler.near.find_all(keys)
    met = rows != NOWHERE
    scheduler.near.drop(rows[met])
    scheduler.tombstones.left.add(keys[~met])
    scheduler.tombstones.add_keys(keys[met], np.maximum(table["due_ms"][met], now_ms))
    for unmet in (True, False):
        marks, counts = np.unique(table["topic"][met != unmet], return_counts=True)
        for mark, count in zip(topics or marks.tolist(), counts.tolist(), strict=False):
            scheduler.topics.gone(mark, unmet=unmet, replaced=True, count=count)
    scheduler.ledger.replaced += len(table)


def number_sources(scheduler: Scheduler, table: CancelledTable) -> npt.NDArray[np.uint32]:
    """The number of each timer's source; schedules hear that the timers go."""
    stores, store = np.unique(table["store_id"], return_inverse=True)
    named, which = np.unique(store << 32 | table["queue_id"], return_inverse=True)
    numbers = np.empty(len(named), dtype=np.uint32)
    for at, each in enumerate(named.tolist()):
        source = SourceId(int(stores[each >> 32]), each & 0xFFFFFFFF)
        offsets = table["offset"][which == at]
        numbers[at] = scheduler.numbers.number_source(source, "", int(offsets[0]))
        if scheduler.schedules:
            scheduler.schedules.left(source, offsets.tolist())
    return numbers[which]


def _take_away(
    scheduler: Scheduler,
    gone: Sequence[Cancelled],
    topics: Sequence[str | int],
    cancelled: int,
    rows: Ids | None,
    now_ms: int,
) -> None:
    """The first `cancelled` of them were, the others were replaced.

    A log of a release before may name one twice, that was cancelled.
    """
    first = {each: at for at, each in reversed(list(enumerate(gone)))}
    if len(first) < len(gone):
        once = sorted(first.values())
        gone, topics = [gone[at] for at in once], [topics[at] for at in once]
        cancelled = sum(at < cancelled for at in once)
        rows = None if rows is None else rows[once]
    tombstones = scheduler.tombstones
    numbered: dict[SourceId, int] = {}
    sources = np.array(
        [
            numbered[each.source] if each.source in numbered else _number(scheduler, each, numbered)
            for each in gone
        ],
        dtype=np.uint32,
    )
    keys = keys_of(sources, np.array([each.offset for each in gone], dtype=np.int64))
    since_ms = np.maximum(np.array([each.due_ms for each in gone], dtype=np.int64), now_ms)
    if rows is None:
        rows = scheduler.near.find_all(keys)
    near = rows >= 0
    if near.any():
        scheduler.near.drop(rows[near])
    tombstones.left.add(keys[~near])
    tombstones.add_keys(keys[cancelled:][near[cancelled:]], since_ms[cancelled:][near[cancelled:]])
    for at in np.flatnonzero(near[:cancelled]).tolist():
        tombstones.add(int(sources[at]), gone[at].offset, int(since_ms[at]), unmet=False)
    named = Counter(
        (topic, met, at >= cancelled)
        for at, (topic, met) in enumerate(zip(topics, near.tolist(), strict=True))
    )
    for (topic, met, replaced), count in named.items():
        scheduler.topics.gone(topic, unmet=not met, replaced=replaced, count=count)
    if scheduler.schedules:
        for each in gone:
            scheduler.schedules.left(each.source, (each.offset,))
    scheduler.ledger.cancelled += cancelled
    scheduler.ledger.replaced += len(gone) - cancelled


def _number(scheduler: Scheduler, first: Cancelled, numbered: dict[SourceId, int]) -> int:
    number = scheduler.numbers.number_source(first.source, "", first.offset)
    numbered[first.source] = number
    return number


def _note_fired(scheduler: Scheduler, fired: Sequence[Cancelled], now_ms: int) -> None:
    """By hand: remembered for as long as their tombstones, which say less."""
    for each in fired:
        number = scheduler.numbers.number_source(each.source, "", each.offset)
        scheduler.fires.note_by_hand(number, each.offset, max(each.due_ms, now_ms))


def _bring_in(scheduler: Scheduler, changed: Changed, home: int, now_ms: int) -> None:
    numbers, data = scheduler.numbers, bytes(changed.frames)
    fetched = list(intake.frames_in(data))
    number = numbers.number_source(changed.source, "", 0)
    targets = [
        numbers.number_target(TargetId(broker, each.target_topic, each.target_queue_id))
        for broker, (each, _, _) in zip(changed.brokers, fetched, strict=True)
    ]
    rows = intake.rows_of(fetched, number, targets)
    if changed.hashes.any():
        rows = dataclasses.replace(rows, timer_key=changed.hashes)
    source = numbers.sources[number]
    source.next_offset = source.durable_offset = fetched[-1].frame.end_offset
    scheduler.ledger.accepted += len(rows)
    for target, (each, _, _) in zip(targets, fetched, strict=True):
        scheduler.topics.of_target(target).accepted += each.count
    blob = Blob(data, Home("", home), accepted_ms=fetched[-1].frame.store_ms)
    scheduler.tiers.admit(rows, blob, now_ms)
