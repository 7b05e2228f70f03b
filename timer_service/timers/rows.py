"""Timers in columns: what the timer service knows of a message it has not yet fired.

No object per timer.  `Rows` is a batch of timers as parallel arrays; its bodies lie in one or more
`Blob`s, byte strings that also have a home on disk from which they can be read again.

    array   column    meaning
    wide    due_ms    when to fire
            offset    queue offset in the source's %TIMER% queue; with the source: the identity
    narrow  source    index into the scheduler's sources: (store id, queue id)
            target    index into the scheduler's targets: (home broker, topic, queue or any)
            home      the record's position relative to its blob's home on disk
            size      bytes of the record's RecordBatch entry
            tag_hash  side arrays of the message, passed on as they came
            key_hash

    timer_key  u64      hash of the topic and the key that its owner gave it (key_hash.py); 0: none.
                        Where no timer of a batch has one there is no such column

The columns are the rows of two matrices, i64 and u32, so that picking timers out costs two NumPy
calls and not eight; a tick often fires only a few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Wide = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.uint32]
Index = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]

WIDE, NARROW = 2, 6  # columns of each


class Home(NamedTuple):
    """Where bytes lie on disk: `file` is empty for the timer log, else a period file's name."""

    file: str
    position: int


class Blob(NamedTuple):
    """Bodies of several timers in memory, and where the same bytes lie on disk.

    A record at `home` (see `Rows`) is at `home - start` of `data`, and at `home.position + home`
    of its file.  `accepted_ms` is when a broker took the messages in, where that is still known: it
    tells those that were due by then from those that are late.
    """

    data: bytes | memoryview
    home: Home
    start: int = 0
    accepted_ms: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """A batch of timers in columns."""

    wide: Wide
    narrow: Narrow
    timer_key: Hashes | None = None

    def __len__(self) -> int:
        return self.wide.shape[1]

    @property
    def due_ms(self) -> Wide:
        """When to fire."""
        return self.wide[0]

    @property
    def offset(self) -> Wide:
        """Queue offset in the source."""
        return self.wide[1]

    @property
    def source(self) -> Narrow:
        """Number of the source."""
        return self.narrow[0]

    @property
    def target(self) -> Narrow:
        """Number of the target."""
        return self.narrow[1]

    @property
    def home(self) -> Narrow:
        """Position of the record, relative to its blob's home."""
        return self.narrow[2]

    @property
    def size(self) -> Narrow:
        """Bytes of the record."""
        return self.narrow[3]

    @property
    def tag_hash(self) -> Narrow:
        """Hash of the tag."""
        return self.narrow[4]

    @property
    def key_hash(self) -> Narrow:
        """Hash of the key."""
        return self.narrow[5]

    def take(self, index: Index) -> Rows:
        """The rows of an index array or of a mask, copied."""
        if index.dtype == np.bool_:
            index = np.flatnonzero(index)
        hashes = self.timer_key if self.timer_key is None else self.timer_key.take(index)
        return Rows(self.wide.take(index, axis=1), self.narrow.take(index, axis=1), hashes)

    def slice(self, start: int, end: int) -> Rows:
        """The rows from `start` to `end`, as views."""
        hashes = self.timer_key if self.timer_key is None else self.timer_key[start:end]
        return Rows(self.wide[:, start:end], self.narrow[:, start:end], hashes)

    def timer_keys(self) -> Hashes:
        """The column `timer_key`, also where there is none."""
        return np.zeros(len(self), dtype=np.uint64) if self.timer_key is None else self.timer_key

    def body_bytes(self) -> int:
        """Size of the records."""
        return int(self.size.sum(dtype=np.int64))

    def ends(self) -> Wide:
        """Where each record ends, relative to its blob's home."""
        return self.home.astype(np.int64) + self.size


KEY_BITS = 48  # of the offset


def key_of(source: int, offset: int) -> int:
    """A timer's identity in one number: 48 bits of offset below the source's number."""
    return source << KEY_BITS | offset


def keys_of(source: Index, offset: Wide) -> npt.NDArray[np.uint64]:
    """`key_of` of many."""
    return source.astype(np.uint64) << np.uint64(KEY_BITS) | offset.astype(np.uint64)


def new_rows(count: int) -> Rows:
    """Rows to be filled in."""
    return Rows(np.empty((WIDE, count), dtype=np.int64), np.empty((NARROW, count), dtype=np.uint32))


def concatenate(parts: Sequence[Rows]) -> Rows:
    """One batch out of several."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return new_rows(0)
    keyed = any(part.timer_key is not None for part in parts)
    return Rows(
        np.concatenate([part.wide for part in parts], axis=1),
        np.concatenate([part.narrow for part in parts], axis=1),
        np.concatenate([part.timer_keys() for part in parts]) if keyed else None,
    )


def runs(values: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """(start, end) of each run of equal values."""
    if not len(values):
        return []
    starts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()]
    return list(zip(starts, [*starts[1:], len(values)], strict=True))
