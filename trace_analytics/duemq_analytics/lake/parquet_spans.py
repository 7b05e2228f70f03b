"""Spans as plain Parquet files in a folder that the driver and all tasks reach.

    LAKE/spans/date=2026-11-22/hour=20/KEY-TASK-COUNT.parquet   by the start of the span, UTC
    LAKE/spans/date=…/hour=…/KEY-TASK-stray-COUNT.parquet       by that of storing (`span_writer`)
    LAKE/quarantine/date=…/hour=…/…                             by the time of storing
    LAKE/_batches/KEY.json     a commit a micro-batch: its files, how far it read
    LAKE/_batches/base.json    batches that a compaction has taken up, as the files that are left

A file counts when a commit names it.  A micro-batch has its key from the query and its number in
the checkpoint: run again after a crash it writes the same files and the same commit, so that the
folder itself never holds a span twice, but while a compaction is between its commit and deleting
what it has replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatch
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from duemq.errors import Corrupt, Unavailable
from duemq_analytics.lake.checkpoints import CHECKPOINT, any_done, query_of
from duemq_analytics.lake.commits import Commits
from duemq_analytics.lake.merging import COLUMNS, COMPACTED, merge
from duemq_analytics.lake.parquet_files import rows_of
from duemq_analytics.lake.span_table import (
    NOT_TOLD,
    Batch,
    Compacted,
    File,
    TopicEnds,
    merged_ends,
    merged_topic_ends,
)
from duemq_analytics.lake.span_writer import hour_of, write_messages
from duemq_analytics.source import schema

_BASE = "base"
_SNAPSHOT_TRIES = 10


@dataclass(frozen=True)
class Base:
    """Batches that were taken up."""

    files: tuple[File, ...] = ()
    quarantine: tuple[str, ...] = ()
    absorbed: tuple[str, ...] = ()
    """Keys whose commits may still be there."""
    replaced: tuple[str, ...] = ()
    """Files to delete."""
    topic_ends: TopicEnds = field(default_factory=dict)
    compactions: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The table at one moment."""

    base: Base
    batches: tuple[Batch, ...]
    """In the order of landing within a query; without those that were taken up."""

    @property
    def files(self) -> list[File]:
        """All that count."""
        return [*self.base.files, *(file for batch in self.batches for file in batch.files)]


class ParquetSpans:
    """A SpanTable.  Mutated by: `land` under the lock `landing`, `compact` under `compacting`."""

    def __init__(self, lake: Path) -> None:
        self._lake = lake
        self._commits = Commits(lake / "_batches")
        self._repeated = False
        """Whether the batch that a killed run may have begun is behind."""

    def drop_unfinished(self) -> None:
        """Deletes what tasks of a killed landing job have written without a commit.

        If its checkpoint is lost, too, nobody would replace it.  Raises Corrupt where commits are
        gone: all would be without one.
        """
        there = self.snapshot()
        if not (there.base.compactions or there.batches) and self._has_landed():
            raise Corrupt(
                f"{self._lake}: micro-batches were landed, and _batches, which says what they have "
                "written, is gone: put it back, or land into another folder",
                field="lake",
                value=str(self._lake),
            )
        refused = [there.base.quarantine, *(batch.quarantine for batch in there.batches)]
        named = {*(file.path for file in there.files), *chain.from_iterable(refused)}
        for table in COLUMNS:
            for path in _files_in(self._lake / table, "*.parquet", ".*.parquet.*"):
                compacted = path.name.lstrip(".").startswith(COMPACTED)
                if not compacted and str(path.relative_to(self._lake)) not in named:
                    path.unlink(missing_ok=True)

    def _has_landed(self) -> bool:
        """Whether there was a commit.  Only a query that has none yet may have left files alone."""
        checkpoint = self._lake / CHECKPOINT
        if checkpoint.exists():
            return any_done(checkpoint)
        return any(any(_files_in(self._lake / table, "[!.]*.parquet")) for table in COLUMNS)

    def land(
        self,
        key: str,
        messages: DataFrame,
        plan: str = "",
        topic_ids: Mapping[str, int] | None = None,
    ) -> Batch:
        """See SpanTable."""
        if not self._repeated and (earlier := self._landed(key, plan)):
            self._repeated = True
            return earlier
        write = partial(write_messages, self._lake, key)
        # As rows, not by mapInArrow, which wants pandas: a row is a message of up to 512 spans.
        rows = messages.rdd.mapPartitionsWithIndex(write).collect()
        batch = replace(_batch_of(key, rows), plan=plan, topic_ids=topic_ids or {})
        self._commits.put(key, batch.as_json())
        if not self._repeated:  # Only the first one of a run can have been begun before.
            self._drop_earlier(batch)
            self._repeated = True
        return batch

    def snapshot(self) -> Snapshot:
        """What is there now, all of it as of one moment."""
        for _ in range(_SNAPSHOT_TRIES):
            base = self._base()
            try:
                # What the last compaction has taken up it may just be removing.
                names = set(self._commits.names()) - {_BASE, *base.absorbed}
                batches = [Batch.of_json(self._commits.get(name)) for name in sorted(names)]
            except FileNotFoundError:  # a further compaction has taken it up
                continue
            if self._base().compactions == base.compactions:
                return Snapshot(base, tuple(batches))
        raise Unavailable(f"{self._lake}: compactions follow each other too fast", field="lake")

    def batches(self) -> list[Batch]:
        """See SpanTable; without those that a compaction has taken up."""
        return list(self.snapshot().batches)

    def files(self) -> list[File]:
        """All that count."""
        return self.snapshot().files

    def read(self, spark: SparkSession, batches: Collection[str] | None = None) -> DataFrame:
        """See SpanTable; None: all spans, of the batches that were taken up, too."""
        there = self.snapshot()
        if batches is None:
            return self.read_files(spark, there.files)
        files = [f for batch in there.batches if batch.key in batches for f in batch.files]
        return self.read_files(spark, files)

    def read_files(self, spark: SparkSession, files: Sequence[File]) -> DataFrame:
        """The spans of some of the files."""
        columns = schema.ddl(schema.SPANS)
        if not files:
            return spark.createDataFrame([], columns)
        return spark.read.schema(columns).parquet(*(str(self._lake / f.path) for f in files))

    def topic_ends(self) -> TopicEnds:
        """See SpanTable."""
        there = self.snapshot()
        found = [there.base.topic_ends, *(batch.topic_ends for batch in there.batches)]
        return merged_topic_ends(found)

    def undecodable(self, since: datetime | None) -> int:
        """See SpanTable."""
        there = self.snapshot()
        paths = chain(there.base.quarantine, *(batch.quarantine for batch in there.batches))
        return sum(rows_of(self._lake / path) for path in paths if not _expired(path, since))

    def expire(self, settled: Collection[str], keep_from: datetime) -> Compacted:
        """See SpanTable."""
        return self._taken_up(settled, keep_from, lambda files, number: (list(files), []))

    def compact(
        self, spark: SparkSession, settled: Collection[str], keep_from: datetime | None
    ) -> Compacted:
        """See SpanTable."""
        return self._taken_up(settled, keep_from, partial(merge, spark, self._lake))

    def _taken_up(
        self,
        settled: Collection[str],
        keep_from: datetime | None,
        merge: Callable[[Sequence[File], int], tuple[list[File], list[str]]],
    ) -> Compacted:
        """`merge`: of the files that stay those to have, and those they replace."""
        base = self._cleaned(self._base())
        self._drop_uncommitted(base.compactions + 1)
        batches = self.batches()
        newest = {_query(batch.key): batch.key for batch in batches}
        # The newest batch of a query may be written again after a crash, if its checkpoint is
        # there: of one that was lost there is another query's now.
        again = {key for query, key in newest.items() if self._may_go_on(query)}
        taken = [b for b in batches if b.key in settled and b.key not in again]
        refused = chain(base.quarantine, *(batch.quarantine for batch in taken))
        before = [*base.files, *chain.from_iterable(batch.files for batch in taken)]
        before += self._still_there(refused)
        kept = [file for file in before if not _expired(file.path, keep_from)]
        after, replaced = merge(kept, base.compactions + 1)
        expired = [file.path for file in before if _expired(file.path, keep_from)]
        base = Base(
            files=tuple(file for file in after if not _is_refused(file)),
            quarantine=tuple(file.path for file in after if _is_refused(file)),
            absorbed=tuple(batch.key for batch in taken),
            replaced=(*replaced, *expired),
            topic_ends=merged_topic_ends([base.topic_ends, *(batch.topic_ends for batch in taken)]),
            compactions=base.compactions + 1,
        )
        self._commits.put(_BASE, asdict(base))
        self._cleaned(base)
        return Compacted(len(before), len(after), len(expired))

    def _still_there(self, quarantine: Iterable[str]) -> Iterator[File]:
        """Of its files, which whoever has seen them may delete: all that a merger wants to know."""
        for path in quarantine:
            with suppress(FileNotFoundError):
                yield File(path, 0, (self._lake / path).stat().st_size, 0, 0)

    def _may_go_on(self, query: str) -> bool:
        """Whether it may land further batches."""
        try:
            return query == query_of(self._lake / CHECKPOINT)
        except (FileNotFoundError, ValueError):
            return True

    def _drop_uncommitted(self, number: int) -> None:
        """Files of a compaction that was killed before its commit, finished or not."""
        killed = f".{COMPACTED}*", f"{COMPACTED}-{number:010}-*.parquet"
        for table in COLUMNS:
            for path in _files_in(self._lake / table, *killed):
                path.unlink(missing_ok=True)

    def _base(self) -> Base:
        try:
            content = self._commits.get(_BASE)
        except FileNotFoundError:
            return Base()
        for name in ("version", "spans", "undecodable"):  # older versions had the latter
            content.pop(name, None)
        if (of_any := content.pop("ends", None)) is not None:  # of an older version
            content["topic_ends"] = {NOT_TOLD: of_any}
        content["files"] = tuple(File(**each) for each in content["files"])
        for name in ("quarantine", "absorbed", "replaced"):
            content[name] = tuple(content[name])
        return Base(**content)

    def _cleaned(self, base: Base) -> Base:
        """Deletes what the last compaction has taken up, also one that died before it could."""
        for path in base.replaced:
            (self._lake / path).unlink(missing_ok=True)
            _drop_empty((self._lake / path).parent)
        for key in base.absorbed:
            self._commits.remove(key)
        return replace(base, absorbed=(), replaced=())

    def _landed(self, key: str, plan: str) -> Batch | None:
        """The batch of this key, if a run that was killed then has landed all of it."""
        try:
            earlier = Batch.of_json(self._commits.get(key))
        except FileNotFoundError:
            return None
        return earlier if plan and earlier.plan == plan else None

    def _drop_earlier(self, batch: Batch) -> None:
        """Files of this batch that an earlier attempt, cut into other tasks, has left."""
        now = {*(file.path for file in batch.files), *batch.quarantine}
        for table in COLUMNS:
            for path in _files_in(self._lake / table, f"{batch.key}-*.parquet"):
                if str(path.relative_to(self._lake)) not in now:
                    path.unlink(missing_ok=True)


def _batch_of(key: str, rows: Sequence[Mapping[str, Any]]) -> Batch:
    read = [row for row in rows if row["kind"] == "read"]
    ends = merged_ends({row["broker"]: {str(row["queue"]): row["past"]}} for row in read)
    names = ("path", "rows", "bytes", "first_us", "last_us")
    spans = sorted((row for row in rows if row["kind"] == "spans"), key=lambda row: row["path"])
    refused = [row for row in rows if row["kind"] == "quarantine"]
    return Batch(
        key,
        tuple(File(**{name: row[name] for name in names}) for row in spans),
        tuple(sorted(row["path"] for row in refused)),
        ends,
        sum(row["rows"] for row in refused),
    )


def _files_in(table: Path, *patterns: str) -> Iterator[Path]:
    """Of all hours, those of one of the patterns.

    Not by `glob`, which raises where a compaction removes an empty hour meanwhile.
    """
    for folder, _, names in os.walk(table):
        for name in names:
            if any(fnmatch(name, pattern) for pattern in patterns):
                yield Path(folder, name)


def _is_refused(file: File) -> bool:
    return file.path.startswith("quarantine/")


def _query(key: str) -> str:
    return key.rpartition("-")[0]


def _expired(path: str, keep_from: datetime | None) -> bool:
    """Whether the hour of a file has ended by then."""
    if keep_from is None:
        return False
    return (hour_of(path) + 1) * 3_600 <= keep_from.timestamp()


def _drop_empty(folder: Path) -> None:
    """An hour without files, and its day."""
    for each in (folder, folder.parent):
        try:
            each.rmdir()
        except OSError:  # there are others in it
            return
