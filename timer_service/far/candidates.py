"""Which blocks timers may lie in, by what the catalog knows of these.  Pure.

Owned by: nobody; a look-up calls it, in its thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.far.catalog import ANY, Entries, Table
from duemq_server.timer_service.timers.rows import keys_of

Numbers = npt.NDArray[np.int64]

FEW = 32  # pairs: up to here a plain loop beats NumPy's fixed cost
_PAIRS_MAX = 1 << 20  # compared at once


class AskedTimers(NamedTuple):
    """Timers in columns."""

    source: npt.NDArray[np.uint32]
    offset: Numbers
    due_ms: Numbers
    since: Numbers
    """In blocks of this number and later."""

    def take(self, index: Any) -> AskedTimers:
        """Those at these places, of a mask or of a slice."""
        source, offset, due_ms, since = self
        return AskedTimers(source[index], offset[index], due_ms[index], since[index])


def candidates(table: Table, asked: AskedTimers) -> tuple[list[int], list[int]]:
    """Pairs (timer, number of a block) such that it may lie there, by block.

    Ranges of offsets hardly overlap: sorted by their begin, those that an offset can lie in follow
    one another.
    """
    order, keys = table.order, keys_of(asked.source, asked.offset)
    low = order.ends.searchsorted(keys, side="left")
    widths = np.maximum(order.begins.searchsorted(keys, side="right") - low, 0)
    if not len(table.unknown) and widths.sum() <= FEW:
        return _of_few(table, asked, low, widths)
    found_timers: list[Numbers] = []
    found_blocks: list[Numbers] = []
    for timers, at in _overlaps(table, low, widths):
        found = table.entries[at]
        fits = _fits(found, asked.take(timers))
        found_timers.append(timers[fits])
        found_blocks.append(found["block"][fits].astype(np.int64))
    timers, numbers = np.concatenate(found_timers), np.concatenate(found_blocks)
    by_block = np.argsort(numbers, kind="stable")
    return timers[by_block].tolist(), numbers[by_block].tolist()


def _of_few(
    table: Table, asked: AskedTimers, low: Numbers, widths: Numbers
) -> tuple[list[int], list[int]]:
    pairs: list[tuple[int, int]] = []
    at, entry = table.order.at, table.entries.item
    rows = zip(*(column.tolist() for column in (*asked, low, widths)), strict=True)
    for timer, (source, offset, due_ms, since, begin, width) in enumerate(rows):
        for each in at[begin : begin + width].tolist():
            number, own, first, last, due, until = entry(each)
            in_it = own == source and first <= offset <= last and due <= due_ms <= until
            if in_it and number >= since:
                pairs.append((number, timer))
    pairs.sort()
    return [timer for _, timer in pairs], [number for number, _ in pairs]


def _fits(entries: Entries, asked: AskedTimers) -> npt.NDArray[np.bool_]:
    """Whether each timer may lie in the block beside it."""
    return np.asarray(
        ((entries["source"] == asked.source) | (entries["source"] == ANY))
        & (entries["first"] <= asked.offset)
        & (asked.offset <= entries["last"])
        & (entries["due"] <= asked.due_ms)
        & (asked.due_ms <= entries["until"])
        & (entries["block"] >= asked.since)
    )


def _overlaps(table: Table, low: Numbers, widths: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Pairs (timer, entry), some at a time: all whose source and offset fit, and some more."""
    for timers, within in _pairs(widths):
        yield timers, table.order.at[low[timers] + within]
    unknown = table.unknown
    if len(unknown):
        for timers, within in _pairs(np.full(len(low), len(unknown))):
            yield timers, unknown[within]


def _pairs(widths: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Each place with 0, 1, ... up to its width, some at a time."""
    totals = np.cumsum(widths)
    start = 0
    while start < len(widths):
        before = int(totals[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(totals, before + _PAIRS_MAX, side="right")))
        width = widths[start:end]
        within = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
        yield np.repeat(np.arange(start, end), width), within
        start = end
