"""Handles of timers, many at once: a list, and columns.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId

Sources = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.int64]


class Handles(Sequence[Cancelled]):
    """A list of handles that is kept in columns; one of them is made when it is asked for."""

    def __init__(
        self, sources: Sequence[SourceId], source: Sources, offset: Numbers, due_ms: Numbers
    ) -> None:
        """`source` indexes `sources`."""
        self.sources = sources
        self.source = source
        self.offset = offset
        self.due_ms = due_ms

    @classmethod
    def of(cls, handles: Sequence[Cancelled]) -> Handles:
        """The same ones; itself, if they are in columns."""
        if isinstance(handles, Handles):
            return handles
        places: dict[SourceId, int] = {}
        source = [places.setdefault(each.source, len(places)) for each in handles]
        return cls(
            list(places),
            np.array(source, dtype=np.uint32),
            np.array([each.offset for each in handles], dtype=np.int64),
            np.array([each.due_ms for each in handles], dtype=np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence[Handles]) -> Handles:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        places: dict[SourceId, int] = {}
        columns = []
        for part in parts:
            numbers = [places.setdefault(each, len(places)) for each in part.sources]
            columns.append(np.array(numbers, dtype=np.uint32)[part.source])
        return cls(
            list(places),
            np.concatenate(columns),
            np.concatenate([part.offset for part in parts]),
            np.concatenate([part.due_ms for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.offset)

    @overload
    def __getitem__(self, at: int) -> Cancelled: ...
    @overload
    def __getitem__(self, at: slice) -> Handles: ...
    def __getitem__(self, at: int | slice) -> Cancelled | Handles:
        source, offset, due_ms = self.source[at], self.offset[at], self.due_ms[at]
        if isinstance(at, slice):
            return Handles(self.sources, source, offset, due_ms)
        return Cancelled(self.sources[int(source)], int(offset), int(due_ms))
