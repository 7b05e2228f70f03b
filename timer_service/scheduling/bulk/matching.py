"""Which timers a job is about: by columns, a block or a table at a time.  Pure, but for `Reading`.

`Reading.run` reads blocks, in any thread, while timers come and fire as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from duemq_server.storage import record
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import CorruptFile
from duemq_server.storage.record import InvalidEntryError
from duemq_server.timer_service.far.bodies import Bytes, Files, Joined
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.far_block import REMEDY, Index
from duemq_server.timer_service.far.reading import as_rows
from duemq_server.timer_service.scheduling.bulk.jobs import Which
from duemq_server.timer_service.timers.key_hash import key_in
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import Rows
from duemq_server.timer_service.timers.wheel import Ids

BLOCKS_AT_ONCE = 32  # read before what was found is done
BYTES_AT_ONCE = 4 << 20  # of bodies, about
PAUSE_EVERY = 256  # records looked at: half a millisecond of work

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]


class Matcher:
    """Of rows that have these sources and targets."""

    def __init__(
        self,
        which: Which,
        fences: Mapping[SourceId, int],
        sources: Sequence[SourceId],
        targets: Sequence[TargetId],
    ) -> None:
        self._which = which
        self._mine = np.array([each.topic == which.topic for each in targets], dtype=np.bool_)
        self._fences = np.array([fences.get(each, 0) for each in sources], dtype=np.int64)

    def mask(self, rows: Rows) -> Mask:
        """Which rows are of the topic, due in time, and were there when the job was accepted.

        With a prefix, of those that have a key at all: who asks must look at their records yet.
        What is moved has none.
        """
        which = self._which
        if not self._mine.any() or (which.key_prefix and rows.timer_key is None):
            return np.zeros(len(rows), dtype=np.bool_)
        mask = (
            self._mine[rows.target]
            & (rows.due_ms >= which.from_ms)
            & (rows.due_ms < which.to_ms)
            & (rows.offset < self._fences[rows.source])
        )
        if which.key_prefix:
            mask &= rows.timer_keys() != 0
        elif which.to_topic and rows.timer_key is not None:
            mask &= rows.timer_keys() == 0
        return np.asarray(mask)

    def among(self, rows: Rows, ids: Ids) -> Ids:
        """As `mask`, of some rows of a large table: a column at a time, of what is left by then."""
        which = self._which
        if not self._mine.any() or (which.key_prefix and rows.timer_key is None):
            return ids[:0]
        ids = ids[self._mine[rows.target[ids]]]
        due_ms = rows.due_ms[ids]
        ids = ids[(due_ms >= which.from_ms) & (due_ms < which.to_ms)]
        ids = ids[rows.offset[ids] < self._fences[rows.source[ids]]]
        if which.key_prefix:
            return ids[rows.timer_keys()[ids] != 0]
        if which.to_topic and rows.timer_key is not None:
            return ids[rows.timer_keys()[ids] == 0]
        return ids


def has_key(entry: Bytes, prefix: str) -> bool:
    """Whether a record's timer key begins so."""
    return key_in(entry).startswith(prefix)


class BlockMatch(NamedTuple):
    """Timers of a block that a job is about, as it was read."""

    block: Block
    at: Places  # rows of the block
    rows: Rows  # in the block's numbers
    sources: list[SourceId]
    targets: list[TargetId]
    bodies: Joined | None  # if they were wanted


class Unread(NamedTuple):
    """A block, and how far it was loaded."""

    block: Block
    cursor: int


class Reading:
    """Reads blocks, and says which of their timers a job is about."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        which: Which,
        fences: Mapping[SourceId, int],
        blocks: Sequence[Unread],
        *,
        with_bodies: bool,
    ) -> None:
        self.found: list[BlockMatch] = []
        self.unread = list(blocks)
        """What is left for another time."""
        self.problems: list[str] = []
        """What could not be read."""
        self._disk = disk
        self._directory = directory
        self._which = which
        self._fences = fences
        self._with_bodies = with_bodies
        self._size = 0
        self._pause: Callable[[], None] = lambda: None

    def files(self) -> set[str]:
        """Those that must stay while it runs."""
        return {each.block.file for each in self.unread}

    def run(self, pause: Callable[[], None] = lambda: None) -> None:
        """Does the work, until enough is read.  Raises DiskFull: what it was at is `unread` yet.

        `pause` is called every now and then: to let another thread have the interpreter.
        """
        self._pause = pause
        with Files(self._disk, self._directory) as files:
            while self.unread and self._size < BYTES_AT_ONCE:
                try:
                    self._read(*self.unread[0], files)
                except CorruptFile as error:
                    self.problems.append(str(error))
                self.unread.pop(0)
                pause()

    def _read(self, each: Block, cursor: int, files: Files) -> None:
        index = files.index_of(each)
        matcher = Matcher(self._which, self._fences, index.sources, index.targets)
        rows = as_rows(index, 0, each.count)
        mask = matcher.mask(rows)
        mask[:cursor] = False
        at = np.flatnonzero(mask)
        if not len(at):
            return
        bodies = None
        if self._with_bodies or self._which.key_prefix:
            bodies = self._bodies(each, index, rows, at, files)
            self._size += len(bodies.data)
        if bodies is not None and self._which.key_prefix:
            kept = []
            for n in range(len(at)):
                if has_key(bodies.at(n), self._which.key_prefix):
                    kept.append(n)
                if n % PAUSE_EVERY == 0:
                    self._pause()
            at, bodies = at[kept], bodies.take(kept)
        if len(at):
            found = rows.take(at), index.sources, index.targets
            self.found.append(BlockMatch(each, at, *found, bodies if self._with_bodies else None))

    def _bodies(self, each: Block, index: Index, rows: Rows, at: Places, files: Files) -> Joined:
        """Verified; read at once from the first to the last."""
        if len(at) == each.count and (whole := _whole(each, index, files)) is not None:
            return Joined(whole, rows.home.astype(np.int64), rows.size.astype(np.int64))
        homes = rows.home[at].astype(np.int64)
        first, end = int(homes[0]), int(homes[-1]) + int(rows.size[at[-1]])
        position = each.position + each.index_length + record.HEADER_BYTES + first
        data = files.read(each.file, position, end - first)
        sizes, crcs = rows.size[at].tolist(), index.rows["crc32c"][at].tolist()
        records = zip((homes - first).tolist(), sizes, crcs, strict=True)
        for n, (start, size, crc) in enumerate(records):
            if n % PAUSE_EVERY == 0:
                self._pause()
            if google_crc32c.value(data[start : start + size]) != crc:
                path = files.path(each.file)
                raise CorruptFile(path, position + start, "CRC-32C of a record is wrong", REMEDY)
        return Joined(data, homes - first, rows.size[at].astype(np.int64))


def _whole(each: Block, index: Index, files: Files) -> bytes | None:
    """All bodies of a block, verified at once; None: they must be looked at one by one."""
    position = each.position + each.index_length
    data = files.read(each.file, position, record.entry_bytes(index.bodies_length))
    try:
        return bytes(record.decode(memoryview(data), 0, position).body)
    except InvalidEntryError:
        return None
