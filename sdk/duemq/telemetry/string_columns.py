"""Columns of texts in a SpanBatch, each text once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import TypeVar

from duemq.v1.trace_pb2 import StringColumn

_Value = TypeVar("_Value")


def put_texts(column: StringColumn, values: Sequence[str]) -> None:
    """One a row; nothing where all are empty."""
    table = dict.fromkeys(values)
    if len(table) == 1:  # of most columns: the same in every row
        _put_one(column, values[0], len(values))
        return
    if len(table) == len(values):
        column.rows.MergeFrom(numbered(len(values)).rows)
    else:
        numbers = dict(zip(table, range(len(table)), strict=True))
        column.rows.extend(map(numbers.__getitem__, values))
    column.values.extend(table)


def put_by_frame(column: StringColumn, values: Sequence[str], counts: Sequence[int]) -> None:
    """So many rows of each value."""
    table = dict.fromkeys(values)
    if len(table) == 1:
        _put_one(column, values[0], sum(counts))
        return
    numbers = dict(zip(table, range(len(table)), strict=True))
    column.rows.extend(repeated(map(numbers.__getitem__, values), counts))
    column.values.extend(table)


def _put_one(column: StringColumn, value: str, count: int) -> None:
    if value:
        column.values.append(value)
        column.rows.MergeFrom(_zeros(count).rows)


@lru_cache
def numbered(count: int) -> StringColumn:
    """So many rows, each of a value of its own."""
    return StringColumn(rows=range(count))


@lru_cache
def _zeros(count: int) -> StringColumn:
    """So many rows of the first value."""
    return StringColumn(rows=[0] * count)


def repeated(values: Iterable[_Value], counts: Sequence[int]) -> list[_Value]:
    """Each so many times."""
    return joined(map(repeat, values, counts))


def joined(parts: Iterable[Iterable[_Value]]) -> list[_Value]:
    """One after the other."""
    return list(chain.from_iterable(parts))
