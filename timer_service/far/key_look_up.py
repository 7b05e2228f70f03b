"""Looking timers up on disk by their keys, and reading them, in a thread of its own.

`KeyLookUp.run` reads what it was given when it was made, and blocks from disk; it changes nothing
but its results.  They may be out of date when it is done (search.py).

A look-up of a key reads the blocks that the filter named: their indexes and, where the hash is
there, the record, whose own topic and key count.  Blocks that the filter does not know yet are read
first, and no keys are looked for in that run.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np

from duemq_server.storage import record
from duemq_server.storage.disk import Disk, DiskFile
from duemq_server.storage.errors import CorruptFile
from duemq_server.timer_service.far import far_block as block
from duemq_server.timer_service.far.catalog import Block, Catalog
from duemq_server.timer_service.far.key_filter import KeyFilter
from duemq_server.timer_service.far.look_up import BlockRow, LookUp, Query
from duemq_server.timer_service.timers.key_hash import key_in
from duemq_server.timer_service.timers.keyed import TimerKey
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import Hashes

LEARNT_MAX = 64  # blocks learnt in a run
_PAUSE_EVERY = 64  # blocks read


class FarTimer(NamedTuple):
    """A timer of a block, read."""

    block: Block
    row: int
    source: SourceId
    offset: int
    due_ms: int
    target: TargetId
    tag_hash: int
    key_hash: int
    timer_key: int
    body: bytes


class KeyAsk:
    """A key to be looked for in some blocks, and what was found."""

    def __init__(self, key: TimerKey, hashed: int, blocks: Sequence[int]) -> None:
        self.key = key
        self.hashed = hashed
        self.blocks = blocks
        self.found: list[FarTimer] = []
        self.errors: list[BlockRow] = []


class HandleAsk:
    """Timers to be looked for by their handles, and read."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.rows: dict[tuple[str, int], list[int]] = {}
        """Where they are, by file and position of the block."""
        self.found: list[FarTimer] = []
        self.errors: list[BlockRow] = []


Ask = KeyAsk | HandleAsk


class KeyLookUp:
    """See the module."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        catalog: Catalog,
        asks: Sequence[KeyAsk],
        handles: Sequence[HandleAsk],
        known: KeyFilter,
        look_up: LookUp,
    ) -> None:
        """`look_up`: of the queries of `handles`."""
        self._disk = disk
        self._directory = directory
        self._reads = 0
        self._pause: Callable[[], None] = lambda: None
        self.learnt: dict[int, Hashes | None] = {}
        self._block = catalog.block
        self._unknown = sorted(known.unknown)[:LEARNT_MAX]
        self._asked: dict[tuple[str, int], tuple[Block, list[Ask]]] = {}
        for ask in asks:
            for number in ask.blocks:
                each = catalog.block(number)
                if each is not None:
                    self._ask(each, ask)
        self._handles = handles
        self.look_up = look_up

    def _ask(self, each: Block, ask: Ask) -> None:
        asks = self._asked.setdefault((each.file, each.position), (each, []))[1]
        if not asks or asks[-1] is not ask:
            asks.append(ask)

    def run(self, pause: Callable[[], None] = lambda: None) -> None:
        """Does the work.  What cannot be read is among the results.  Raises DiskFull.

        `pause` is called every now and then: to let another thread have the interpreter.
        """
        self._pause = pause
        if self._handles:
            self._find_handles()
        by_file: dict[str, list[tuple[Block, list[Ask]]]] = defaultdict(list)
        for (name, _), asked in sorted(self._asked.items(), key=lambda item: item[0]):
            by_file[name].append(asked)
        for name, blocks in by_file.items():
            with _Reader(self._disk, os.path.join(self._directory, name)) as reader:
                for each, asks in blocks:
                    self._in_block(reader, each, asks)
        self._learn()

    def _find_handles(self) -> None:
        self.look_up.run(self._pause)
        for ask in self._handles:
            for _, place in ask.query.places():
                self._ask(place.block, ask)
                at = place.block.file, place.block.position
                ask.rows.setdefault(at, []).append(place.row)
            ask.errors += itertools.chain.from_iterable(ask.query.errors.values())

    def _learn(self) -> None:
        for number in self._unknown:
            each = self._block(number)
            if each is None:
                continue
            self._breathe()
            with _Reader(self._disk, os.path.join(self._directory, each.file)) as reader:
                try:
                    hashes = reader.index(each).timer_key
                except CorruptFile:
                    self.learnt[number] = None
                    continue
            if hashes is not None:
                self.learnt[number] = hashes[hashes != 0].astype(np.uint64)

    def _in_block(self, reader: _Reader, each: Block, asks: list[Ask]) -> None:
        self._breathe()
        try:
            index = reader.index(each)
        except CorruptFile as error:
            for ask in asks:
                ask.errors.append(BlockRow(each, 0, error))
            return
        starts, rows_of = index.starts(), _rows_by_hash(index, asks)
        for ask in asks:
            for row in _rows(rows_of, each, ask):
                try:
                    found = reader.timer(each, index, row, int(starts[row]))
                except CorruptFile as error:
                    ask.errors.append(BlockRow(each, row, error))
                    continue
                if isinstance(ask, HandleAsk) or _is(ask.key, found):
                    ask.found.append(found)

    def _breathe(self) -> None:
        self._reads += 1
        if self._reads % _PAUSE_EVERY == 0:
            self._pause()


def _rows_by_hash(index: block.Index, asks: Sequence[Ask]) -> dict[int, list[int]]:
    """The rows that have hashes which are asked for."""
    wanted = [ask.hashed for ask in asks if isinstance(ask, KeyAsk)]
    if index.timer_key is None or not wanted:
        return {}
    if len(wanted) == 1:
        rows = np.flatnonzero(index.timer_key == np.uint64(wanted[0]))
    else:
        rows = np.flatnonzero(np.isin(index.timer_key, np.array(wanted, dtype=np.uint64)))
    found: dict[int, list[int]] = {}
    for row, hashed in zip(rows.tolist(), index.timer_key[rows].tolist(), strict=True):
        found.setdefault(hashed, []).append(row)
    return found


def _rows(rows_of: dict[int, list[int]], each: Block, ask: Ask) -> list[int]:
    if isinstance(ask, HandleAsk):
        return ask.rows.get((each.file, each.position), [])
    return rows_of.get(ask.hashed, [])


def _is(key: TimerKey, found: FarTimer) -> bool:
    return found.target.topic == key.topic and key_in(found.body) == key.key


class _Reader:
    """Reads blocks of one file; a context manager."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._file: DiskFile | None = None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self, length: int, position: int) -> memoryview:
        try:
            if self._file is None:
                self._file = self._disk.open(self._path)
            return memoryview(self._file.pread(length, position))
        except OSError as error:
            raise CorruptFile(self._path, position, str(error), block.REMEDY) from error

    def index(self, each: Block) -> block.Index:
        """Raises CorruptFile, DiskFull."""
        data = self._read(each.index_length, each.position)
        try:
            return block.decode_index(record.decode(data, 0, each.position).body)
        except ValueError as error:
            raise CorruptFile(
                self._path, each.position, f"block index: {error}", block.REMEDY
            ) from error

    def timer(self, each: Block, index: block.Index, row: int, start: int) -> FarTimer:
        """Raises CorruptFile."""
        due_ms, offset, source, target, size, tag_hash, key_hash, crc = index.rows[row].tolist()
        position = each.position + each.index_length + record.HEADER_BYTES + start
        body = bytes(self._read(size, position))
        if google_crc32c.value(body) != crc:
            raise CorruptFile(self._path, position, "CRC-32C of a record is wrong", block.REMEDY)
        hashed = 0 if index.timer_key is None else int(index.timer_key[row])
        sent_by, goes_to = index.sources[source], index.targets[target]
        return FarTimer(
            each, row, sent_by, offset, due_ms, goes_to, tag_hash, key_hash, hashed, body
        )
