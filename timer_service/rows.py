"""Timers in columns: what the timer service knows of a message it has not yet fired.

No object per timer.  `Rows` is a batch of timers as parallel arrays; its bodies lie in one or more
`Blob`s, byte strings that also have a home on disk from which they can be read again.

    column      type  meaning
    due_ms      i64   when to fire
    offset      i64   queue offset in the source's %TIMER% queue; with the source: the identity
    source      i32   index into the scheduler's sources: (store id, queue id)
    target      i32   index into the scheduler's targets: (home broker, topic, queue or any)
    home        u32   the record's position relative to its blob's home on disk
    size        u32   bytes of the record's RecordBatch entry
    tag_hash    u32   side arrays of the message, passed on as they came
    key_hash    u32
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]
Index = npt.NDArray[Any]

COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("due_ms", np.int64),
    ("offset", np.int64),
    ("source", np.int32),
    ("target", np.int32),
    ("home", np.uint32),
    ("size", np.uint32),
    ("tag_hash", np.uint32),
    ("key_hash", np.uint32),
)


class Home(NamedTuple):
    """Where bytes lie on disk: `file` is empty for the timer log, else a period file's name."""

    file: str
    position: int


class Blob(NamedTuple):
    """Bodies of several timers in memory, and where the same bytes lie on disk.

    A record at `home` (see `Rows`) is at `home - start` of `data`, and at `home.position + home`
    of its file.
    """

    data: bytes | memoryview
    home: Home
    start: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """A batch of timers in columns; every column has the same length."""

    due_ms: Times
    offset: Times
    source: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]
    home: npt.NDArray[np.uint32]
    size: npt.NDArray[np.uint32]
    tag_hash: npt.NDArray[np.uint32]
    key_hash: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.due_ms)

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """The columns in the order of `COLUMNS`."""
        return tuple(getattr(self, name) for name, _ in COLUMNS)

    def take(self, index: Index) -> Rows:
        """The rows of an index array or a mask, or of a slice (then without copying)."""
        return Rows(*(column[index] for column in self.columns()))

    def slice(self, start: int, end: int) -> Rows:
        """The rows from `start` to `end`, as views."""
        return Rows(*(column[start:end] for column in self.columns()))

    def body_bytes(self) -> int:
        """Size of the records."""
        return int(self.size.sum(dtype=np.int64))


def empty_rows() -> Rows:
    """No rows."""
    return Rows(*(np.empty(0, dtype=kind) for _, kind in COLUMNS))


def concatenate(parts: Sequence[Rows]) -> Rows:
    """One batch out of several."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return empty_rows()
    return Rows(*(np.concatenate(columns) for columns in zip(*map(Rows.columns, parts), strict=True)))


def runs(values: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """(start, end) of each run of equal values."""
    if not len(values):
        return []
    starts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()]
    return list(zip(starts, [*starts[1:], len(values)], strict=True))
