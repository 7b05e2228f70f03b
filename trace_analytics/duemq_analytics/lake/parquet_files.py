"""Parquet files that appear whole under their name, or not at all.

Runs in Spark's Python workers.  A file is written under a hidden name, made durable and renamed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from duemq.errors import Corrupt
from duemq_analytics.lake.commits import make_folder, sync

ROWS_PER_GROUP = 131_072
"""Rows of one row group: what a reader skips or reads as a whole."""

BYTES_PER_GROUP = 256 * 1024 * 1024
"""About so many, if its rows are large."""

# Ids do not repeat: a dictionary of them is built, grows too large and is thrown away.
_NO_DICTIONARY = frozenset({"trace_id", "span_id", "parent_span_id", "message_id", "start_ns"})


_FOLDER_TRIES = 5


class ParquetFile:
    """One file that is being written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.rows = 0
        self._path = path
        self._hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        _create(self._hidden)
        self._writer = parquet.ParquetWriter(
            self._hidden,
            schema,
            compression="zstd",
            use_dictionary=[n for n in _leaves(schema) if n not in _NO_DICTIONARY],
            # Spark reads no nanoseconds and wants no INT96.
            coerce_timestamps="us",
            # It would tell of dictionaries, which are a matter of writing alone.
            store_schema=False,
        )

    def write(self, table: pa.Table) -> None:
        """One row group."""
        self._writer.write_table(table, row_group_size=ROWS_PER_GROUP)
        self.rows += table.num_rows

    def finish(self) -> int:
        """It is there from now on, in place of one of that name; answers its bytes."""
        self._writer.close()
        sync(self._hidden)
        size = self._hidden.stat().st_size
        self._hidden.rename(self._path)
        sync(self._path.parent)
        return size

    def abandon(self) -> None:
        """It will not be there."""
        try:
            self._writer.close()
        except (OSError, pa.ArrowException):
            pass  # it writes to the end of the file, and the disk may be full
        finally:
            self._hidden.unlink(missing_ok=True)


def _create(path: Path) -> None:
    """An empty file in its folder, which a compaction may just be removing because it is empty."""
    for left in reversed(range(_FOLDER_TRIES)):
        try:
            make_folder(path.parent)
            path.touch()
        except FileNotFoundError:
            if not left:
                raise
        else:
            return


def merged(paths: Iterable[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of files in tables of about a row group; columns that older files lack are null.

    Row group by row group: they were bounded when they were written, and a small file may have many
    bytes that compress well.  Raises Corrupt naming a file.
    """
    gathered: list[pa.Table] = []
    rows = size = 0
    for path in paths:
        for group in _row_groups(path):
            gathered.append(_fitted(group, schema))
            rows += group.num_rows
            size += group.nbytes
            if rows >= ROWS_PER_GROUP or size >= BYTES_PER_GROUP:
                yield pa.concat_tables(gathered)
                gathered, rows, size = [], 0, 0
    if gathered:
        yield pa.concat_tables(gathered)


def _row_groups(path: Path) -> Iterator[pa.Table]:
    try:
        with parquet.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number)
    except pa.ArrowException as error:
        raise Corrupt(f"{path} cannot be read: {error}", field="lake") from error


def rows_of(path: Path) -> int:
    """How many a file has; of one that somebody has deleted none.  Raises Corrupt naming it."""
    try:
        rows: int = parquet.read_metadata(path).num_rows
    except FileNotFoundError:
        return 0
    except pa.ArrowException as error:
        raise Corrupt(f"{path}: {error}; remove it, or put it back", field="lake") from error
    return rows


def _fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    known = set(table.column_names)
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in known
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _leaves(schema: pa.Schema) -> list[str]:
    """Columns as Parquet names them, of a list or a map those inside."""
    inside = {
        "links": ["links.list.element.trace_id", "links.list.element.span_id"],
        "attributes": ["attributes.key_value.key", "attributes.key_value.value"],
    }
    return [leaf for name in schema.names for leaf in inside.get(name, [name])]
