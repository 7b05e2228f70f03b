"""From trace messages to Parquet files by hour, in one Spark task.

Spans never pass through Java: a message comes in as bytes, is decoded column by column and written
by Arrow.  Through Spark's own writer it costs three times the CPU.

A span lies by the hour of its start.  A clock may be years off, and whoever may send can claim any
time: what started more than STRAY_HOURS before or after it was stored, a stray, lies by the hour of
its storing, in files of its own, so that the others say of a short time that it is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from duemq.errors import Corrupt
from duemq_analytics.lake.parquet_files import BYTES_PER_GROUP, ROWS_PER_GROUP, ParquetFile
from duemq_analytics.source import schema, spans
from duemq_analytics.source.plan import QueueRange

MESSAGES_SCHEMA = "broker string, queue int, offset bigint, body binary, store_ts timestamp"
"""What `write_messages` takes, of the format `duemq`."""

DICTIONARIES = frozenset(
    column.name
    for column in schema.SPANS
    if column.spark_type == "string"
    and column.name not in {"trace_id", "span_id", "parent_span_id", "message_id", "key"}
)
"""Columns with few distinct texts: they are written as the tables that they are on the wire."""

QUARANTINE = (*schema.select(schema.SPANS, schema.PLACE), *schema.UNDECODABLE)
"""Columns of what cannot be decoded."""

HOURS_OPEN_MAX = 24
"""Files that a task writes at a time.  Spans with random times open others later."""

STRAY_HOURS = 24

US_PER_HOUR = 3_600_000_000

_ROWS, _BYTES = ROWS_PER_GROUP, BYTES_PER_GROUP
"""Gathered until they are written: rows, or bytes if they are large."""

_US_PER_S = 1_000_000
_SPANS = schema.arrow_schema(schema.SPANS, DICTIONARIES)


def write_messages(
    lake: Path, key: str, task: int, messages: Iterable[Any]
) -> Iterator[dict[str, Any]]:
    """Writes all of a task's messages, rows of MESSAGES_SCHEMA; answers what it has written:

    a row a file, with `kind` spans or quarantine, path, rows, bytes, first_us, last_us; and a row a
    queue, `read`, with broker, queue and the offset after the last message.

    Names are made of key, task and order: a repeated task writes the same files again.
    """
    written = _Task(lake, key, task)
    try:
        for message in messages:
            written.add(*message)
        rows = written.finish()
    except BaseException:
        written.abandon()
        raise
    yield from rows


class _Task:
    """What one task has gathered and written."""

    def __init__(self, lake: Path, key: str, task: int) -> None:
        self._spans = HourFiles(lake, "spans", f"{key}-{task:05}", _SPANS)
        self._quarantine = HourFiles(
            lake, "quarantine", f"{key}-{task:05}", schema.arrow_schema(QUARANTINE)
        )
        self._strays = HourFiles(lake, "spans", f"{key}-{task:05}-stray", _SPANS)
        self._past: dict[tuple[str, int], int] = {}
        self._gathered: list[pa.RecordBatch] = []
        self._stored: list[int] = []
        """When their messages were stored, Unix microseconds."""
        self._rows = self._bytes = 0
        self._refused: list[tuple[int, pa.RecordBatch]] = []
        self._refused_bytes = 0

    def add(self, broker: str, queue: int, offset: int, body: bytes, stored: datetime) -> None:
        self._past[broker, queue] = max(self._past.get((broker, queue), 0), offset + 1)
        place = QueueRange(broker, "", queue, offset, offset + 1)
        stored_us = int(stored.timestamp() * _US_PER_S)
        try:
            decoded = spans.to_arrow(bytes(body), place, offset, schema.SPANS, DICTIONARIES)
        except Corrupt as error:
            refused = spans.undecodable(bytes(body), error.message, place, offset, QUARANTINE)
            self._refuse(stored_us, refused)
        else:
            self._gather(stored_us, decoded)

    def _gather(self, stored_us: int, decoded: pa.RecordBatch) -> None:
        self._gathered.append(decoded)
        self._stored.append(stored_us)
        self._rows += decoded.num_rows
        # `nbytes` counts what is used of each buffer, at a tenth of the cost of decoding.
        self._bytes += decoded.get_total_buffer_size()
        if self._rows >= _ROWS or self._bytes >= _BYTES:
            self._flush()

    def _refuse(self, stored_us: int, refused: pa.RecordBatch) -> None:
        self._refused.append((stored_us, refused))
        self._refused_bytes += refused.nbytes
        if len(self._refused) >= _ROWS or self._refused_bytes >= _BYTES:
            self._flush_refused()

    def _flush_refused(self) -> None:
        """By the hour of storing: what cannot be read has no other time."""
        hours: dict[int, list[tuple[int, pa.RecordBatch]]] = {}
        for stored_us, row in self._refused:
            hours.setdefault(stored_us // US_PER_HOUR, []).append((stored_us, row))
        for hour, found in hours.items():
            table = pa.Table.from_batches([row for _, row in found])
            self._quarantine.write(hour, table, (found[0][0], found[-1][0]))
        self._refused, self._refused_bytes = [], 0

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._gathered).unify_dictionaries()
        stored = np.repeat(self._stored, [batch.num_rows for batch in self._gathered])
        self._gathered, self._stored, self._rows, self._bytes = [], [], 0, 0
        starts = _starts(table)
        strays = np.abs(starts - stored) > STRAY_HOURS * US_PER_HOUR
        if strays.any():
            _write_by_hour(self._strays, stored[strays] // US_PER_HOUR, table.filter(strays))
            table, starts = table.filter(~strays), starts[~strays]
        _write_by_hour(self._spans, starts // US_PER_HOUR, table)

    def finish(self) -> list[dict[str, Any]]:
        if self._gathered:
            self._flush()
        self._flush_refused()
        read = [
            {"kind": "read", "broker": broker, "queue": queue, "past": past}
            for (broker, queue), past in self._past.items()
        ]
        return [*chain.from_iterable(files.finish() for files in self._files()), *read]

    def abandon(self) -> None:
        for files in self._files():
            files.abandon()

    def _files(self) -> tuple[HourFiles, ...]:
        return self._spans, self._strays, self._quarantine


def _starts(table: pa.Table) -> np.ndarray:
    """Of spans, Unix microseconds."""
    return table.column("start_ts").cast(pa.int64()).to_numpy()


def _write_by_hour(files: HourFiles, hours: np.ndarray, table: pa.Table) -> None:
    """Spans of these hours, sorted by start where they are of more than one."""
    found = np.unique(hours)
    if len(found) > 1:
        order = np.lexsort((_starts(table), hours))
        table, hours = table.take(order), hours[order]
    cuts = [*hours.searchsorted(found), len(hours)]
    for hour, (begin, end) in zip(found, pairwise(cuts), strict=True):
        part = table.slice(begin, end - begin)
        starts = _starts(part)
        files.write(int(hour), part, (int(starts.min()), int(starts.max())))


class HourFiles:
    """Files of one table, each of one hour: TABLE/date=2026-11-22/hour=20/NAME-0.parquet."""

    def __init__(self, lake: Path, table: str, name: str, columns: pa.Schema) -> None:
        self._lake = lake
        self._table = table
        self._name = name
        self._schema = columns
        self._open: dict[int, tuple[str, ParquetFile]] = {}
        self._times: dict[str, list[int]] = {}
        self._written: list[dict[str, Any]] = []
        self._count = 0

    def write(self, hour: int, table: pa.Table, times_us: tuple[int, int]) -> None:
        """Rows of an hour; `times_us`: the first and the last time in them."""
        if hour not in self._open:
            if len(self._open) >= HOURS_OPEN_MAX:
                self._close()
            folder = f"{self._table}/{hour_folder(hour)}"
            path = f"{folder}/{self._name}-{self._count}.parquet"
            self._count += 1
            self._open[hour] = path, ParquetFile(self._lake / path, self._schema)
        path, file = self._open[hour]
        file.write(table)
        self._times.setdefault(path, []).extend(times_us)

    def finish(self) -> list[dict[str, Any]]:
        """Closes all; answers what was written."""
        self._close()
        return self._written

    def abandon(self) -> None:
        """Leaves nothing of what is open."""
        for _, file in self._open.values():
            file.abandon()

    def _close(self) -> None:
        for path, file in self._open.values():
            times = self._times.pop(path)
            row = {"kind": self._table, "path": path, "rows": file.rows, "bytes": file.finish()}
            self._written.append(row | {"first_us": min(times), "last_us": max(times)})
        self._open = {}


def hour_folder(hour: int) -> str:
    """`hour` counts from 1970, UTC; beyond what a date can say it is the last one it can."""
    begin = datetime.fromtimestamp(min(hour, _LAST_HOUR) * 3_600, UTC)
    return f"date={begin:%Y-%m-%d}/hour={begin:%H}"


def hour_of(path: str) -> int:
    """The inverse, of a file's path beneath the lake."""
    date, hour = (part.partition("=")[2] for part in Path(path).parts[1:3])
    begin = datetime.strptime(f"{date} {hour}", "%Y-%m-%d %H").replace(tzinfo=UTC)
    return int(begin.timestamp()) // 3_600


_LAST_HOUR = int(datetime(9999, 12, 31, 23, tzinfo=UTC).timestamp()) // 3_600
