"""Which stored records a pull gets: consume-queue entries in, runs out.  Pure.

A *run* is a stretch of records with consecutive queue offsets that lie side by side in one frame:
what can be copied out of the log in one slice.  One that does not begin where the one before ends
begins a run: who checks a run against its frame has checked each entry.  Small pulls are selected
by a loop, larger ones by NumPy over the whole page; never is a body looked at.

Where a limit cuts, it cuts between two frames if that leaves anything: a reader has to read and
verify whole frames, so a frame handed out in two halves costs twice.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from duemq_server.storage.indexes import consume_queue

# Fewer entries than this are walked by a loop.
VECTOR_ENTRIES_MIN = 48
# Up to so many tags are compared one after the other: quicker than a sort.
COMPARED_MAX = 8

_ENTRY = struct.Struct("<QIIIIQ")
assert _ENTRY.size == consume_queue.ENTRY_BYTES


class FrameRun(NamedTuple):
    """Records [offset, offset + records) lie at log positions [start, end) in one frame."""

    offset: int
    records: int
    start: int
    end: int
    frame: int
    store_ms: int
    seen_end: int = 0
    """With a filter: where the frame ends as far as the page shows it; else 0."""


class Selection(NamedTuple):
    """`next_offset`: past the last record, and past what the filter left out."""

    runs: list[FrameRun]
    next_offset: int
    records: int
    bytes: int


def select(
    page: memoryview,
    offset: int,
    records_max: int,
    bytes_max: int,
    wanted: frozenset[int] | None = None,
    *,
    at_least_one: bool = True,
) -> Selection:
    """Runs of a page of consume-queue entries whose first is that of `offset`.

    With `at_least_one` the first record comes even if it is larger than `bytes_max`.
    """
    count = len(page) // consume_queue.ENTRY_BYTES
    if count < VECTOR_ENTRIES_MIN:
        entries = list(_ENTRY.iter_unpack(page))
        return _select_loop(entries, offset, records_max, bytes_max, wanted, at_least_one)
    return _select_vector(page, offset, records_max, bytes_max, wanted, at_least_one)


def _select_loop(
    entries: list[tuple[int, ...]],
    offset: int,
    records_max: int,
    bytes_max: int,
    wanted: frozenset[int] | None,
    at_least_one: bool,
) -> Selection:
    chosen: list[int] = []
    taken = 0
    cut = len(entries)
    for index, (_, size, _, tag_hash, _, _) in enumerate(entries):
        if wanted is not None and tag_hash not in wanted:
            continue
        too_many = len(chosen) >= records_max or taken + size > bytes_max
        if too_many and (chosen or not at_least_one):
            cut = index
            break
        chosen.append(index)
        taken += size
    if cut < len(entries) and chosen:
        frame = entries[cut][0] - entries[cut][2]
        first = entries[chosen[0]]
        if first[0] - first[2] != frame:
            while chosen and entries[chosen[-1]][0] - entries[chosen[-1]][2] == frame:
                cut = chosen.pop()
                taken -= entries[cut][1]
    runs: list[FrameRun] = []
    for index in chosen:
        position, size, back, _, _, store_ms = entries[index]
        last = runs[-1] if runs else None
        beside = last and last.end == position and last.offset + last.records == offset + index
        if last and beside and last.frame == position - back:
            runs[-1] = last._replace(records=last.records + 1, end=position + size)
        else:
            runs.append(
                FrameRun(offset + index, 1, position, position + size, position - back, store_ms)
            )
    if wanted is not None:
        ends = {position - back: position + size for position, size, back, *_ in entries}
        runs = [run._replace(seen_end=ends[run.frame]) for run in runs]
    return Selection(runs, offset + cut, len(chosen), taken)


def _select_vector(
    page: memoryview,
    offset: int,
    records_max: int,
    bytes_max: int,
    wanted: frozenset[int] | None,
    at_least_one: bool,
) -> Selection:
    entries = consume_queue.decode(page)
    total = len(entries)
    if wanted is None:
        chosen = np.arange(min(total, records_max + 1))
    else:
        chosen = np.flatnonzero(_is_wanted(entries["tag_hash"], wanted))[: records_max + 1]
    if not len(chosen):
        return Selection([], offset + total, 0, 0)
    position = entries["position"].astype(np.int64)
    size = entries["size"].astype(np.int64)
    frame = position - entries["frame_back"]
    ends = np.cumsum(size[chosen])
    fit = min(int(np.searchsorted(ends, bytes_max, side="right")), records_max)
    if fit == 0 and at_least_one:
        fit = 1
    cut = total
    if fit < len(chosen):
        cut = int(chosen[fit])
        whole = int(np.searchsorted(frame[chosen[:fit]], frame[cut], side="left"))
        if whole:
            fit = whole if whole < fit else fit
            cut = int(chosen[fit])
    chosen = chosen[:fit]
    if not fit:
        return Selection([], offset + cut, 0, 0)
    # Without a filter a slice: looking up each costs more than all else here.
    picked = slice(fit) if wanted is None else chosen
    frames, starts, past = frame[picked], position[picked], (position + size)[picked]
    apart = (frames[1:] != frames[:-1]) | (starts[1:] != past[:-1])
    if wanted is not None:
        apart |= np.diff(chosen) != 1
    breaks = np.flatnonzero(apart) + 1
    firsts = np.concatenate(([0], breaks))
    lasts = np.concatenate((breaks, [fit])) - 1
    seen_ends = [0] * len(firsts)
    if wanted is not None:
        seen = np.searchsorted(frame, frames[firsts], side="right") - 1
        seen_ends = (position + size)[seen].tolist()
    rows = zip(
        (chosen[firsts] + offset).tolist(),
        (lasts - firsts + 1).tolist(),
        starts[firsts].tolist(),
        past[lasts].tolist(),
        frames[firsts].tolist(),
        entries["store_ms"][chosen[firsts]].tolist(),
        seen_ends,
        strict=True,
    )
    return Selection([FrameRun(*row) for row in rows], offset + cut, fit, int(ends[fit - 1]))


def _is_wanted(hashes: npt.NDArray[np.uint32], wanted: frozenset[int]) -> npt.NDArray[np.bool_]:
    if len(wanted) > COMPARED_MAX:
        return np.isin(hashes, np.array(sorted(wanted), dtype=np.uint32))
    hashes = np.ascontiguousarray(hashes)
    first, *others = wanted
    found = hashes == first
    for each in others:
        found |= hashes == each
    return found


def frames_of(runs: Iterable[FrameRun]) -> list[tuple[int, int]]:
    """(frame, end of what is wanted of it), each frame once, in order."""
    frames: list[tuple[int, int]] = []
    for run in runs:
        if frames and frames[-1][0] == run.frame:
            frames[-1] = (run.frame, run.end)
        else:
            frames.append((run.frame, run.end))
    return frames
