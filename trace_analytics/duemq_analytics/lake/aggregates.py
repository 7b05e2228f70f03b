"""The tables that a report is made of, brought up to date run by run.

    LAKE/minutes/run=N/    measures of new spans, and of messages that have new spans
    LAKE/examples/run=N/   slowest messages and suspects
    LAKE/errors/run=N/     new spans that failed, by the kind of error
    LAKE/_runs/N.json      a commit a run: the batches it has counted

A run reads the batches that no run before has counted, and of what is there already only the hours
around them.  Without its commit it has not been: the next run does the same under the same number.
A run with `whole` in its commit stands for all before it: a recomputation, or a compaction.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from duemq.errors import Corrupt
from duemq_analytics.answers.buckets import MINUTE_S
from duemq_analytics.answers.errors import added_up
from duemq_analytics.lake import measures
from duemq_analytics.lake.commits import Commits, sync_table
from duemq_analytics.lake.parquet_spans import ParquetSpans, Snapshot
from duemq_analytics.lake.span_table import Batch, File
from duemq_analytics.progress import StepProgress

TABLES = ("minutes", "examples", "errors")
_NEWER_TABLES = ("errors",)
"""Runs of older versions have none."""

MINUTES_MAX = 10_000
"""A week.  Where messages of more minutes have new spans, all minutes are computed again."""


@dataclass(frozen=True)
class AggregationResult:
    """What an aggregation has done."""

    number: int
    batches: int
    spans: int
    """New ones."""
    newest_us: int
    """Latest start of a span so far, Unix µs; 0: there is none."""


class Aggregates:
    """The tables of one lake.

    Mutated by: `update`, `rebuild` and `compact`, under the lock `aggregating`.
    """

    def __init__(self, lake: Path, spans: ParquetSpans) -> None:
        self._lake = lake
        self._spans = spans
        self._runs = Commits(lake / "_runs")

    def settled(self) -> set[str]:
        """Keys of the batches that were counted."""
        return {key for name in self._names() for key in self._runs.get(name)["batches"]}

    def last(self) -> AggregationResult:
        """The newest run; number 0: there is none."""
        names = self._runs.names()
        if not names:
            return AggregationResult(0, 0, 0, 0)
        found = self._runs.get(names[-1])
        return AggregationResult(
            int(names[-1]), found["counted"], found["spans"], found["newest_us"]
        )

    def update(
        self, spark: SparkSession, progress: StepProgress | None = None
    ) -> AggregationResult:
        """Counts the batches that are new; answers the newest run."""
        settled, last, there = self.settled(), self.last(), self._spans.snapshot()
        if last.number == 0:
            return self._run(spark, there, there.batches, last, progress) if there.files else last
        new = [batch for batch in there.batches if batch.key not in settled]
        return self._run(spark, there, new, last, progress) if new else last

    def rebuild(
        self, spark: SparkSession, progress: StepProgress | None = None
    ) -> AggregationResult:
        """Counts everything again that is in the lake; of hours that expired nothing stays."""
        there = self._spans.snapshot()
        run = self._run(spark, there, there.batches, self.last(), progress, whole=True)
        self._drop_before(run.number)
        return run

    def compact(self, spark: SparkSession, keep: tuple[datetime, datetime] | None) -> int:
        """Merges all runs into one; answers how many.  `keep`: only the minutes of this time.

        Not those ahead of it either, which wrong clocks make: their time would never be over.
        """
        names, last = self._names(), self.last()
        if len(names) < 2 and keep is None:
            return 0
        number = last.number + 1
        kept = F.lit(True)
        if keep is not None:
            begin, end = keep
            kept = F.col("bucket_ts").between(F.lit(begin), F.lit(end))
        minutes = measures.merged(self.minutes(spark).where(kept), [MINUTE_S])
        self._write(minutes.drop("bucket_s", "curve_us"), "minutes", number)
        self._write(self.examples(spark).where(kept), "examples", number)
        failed = added_up(self.errors(spark).where(kept).withColumn("bucket_s", F.lit(MINUTE_S)))
        self._write(failed.drop("bucket_s"), "errors", number)
        there = {batch.key for batch in self._spans.batches()}
        self._commit(
            AggregationResult(number, 0, 0, last.newest_us), self.settled() & there, whole=True
        )
        self._drop_before(number)
        return len(names)

    def minutes(self, spark: SparkSession) -> DataFrame:
        """MINUTES_SCHEMA; several rows of a key add up."""
        return self._live(spark, "minutes", measures.MINUTES_SCHEMA)

    def examples(self, spark: SparkSession) -> DataFrame:
        """EXAMPLES_SCHEMA."""
        return self._live(spark, "examples", measures.EXAMPLES_SCHEMA)

    def errors(self, spark: SparkSession) -> DataFrame:
        """ERRORS_SCHEMA; several rows of a key add up."""
        return self._live(spark, "errors", measures.ERRORS_SCHEMA)

    def _run(
        self,
        spark: SparkSession,
        there: Snapshot,
        new: Sequence[Batch],
        last: AggregationResult,
        progress: StepProgress | None,
        *,
        whole: bool = False,
    ) -> AggregationResult:
        """Counts the batches `new`, or all that is there: with `whole`, and in the first run."""
        progress = progress or StepProgress()
        whole = whole or last.number == 0
        files = there.files if whole else [file for batch in new for file in batch.files]
        spans = self._spans.read_files(spark, files)
        around: DataFrame = spans
        minutes: list[int] | None = None
        if not whole:
            with progress.step("finding messages with new spans"):
                around = self._spans.read_files(spark, near(there.files, files))
                minutes = affected(spans, around)
                if len(minutes) > MINUTES_MAX:
                    around, minutes = self._spans.read_files(spark, there.files), None
                else:
                    around = between_ids(around, measures.sends(around, minutes))
        with progress.step("aggregating"):
            self._count(spans, measures.messages(around, minutes), last.number + 1)
        newest_us = max([last.newest_us, *(file.last_us for file in files)])
        run = AggregationResult(
            last.number + 1, len(new), sum(file.rows for file in files), newest_us
        )
        self._commit(run, [batch.key for batch in new], whole=whole)
        return run

    def _count(self, spans: DataFrame, messages: DataFrame, number: int) -> None:
        messages = messages.cache()
        try:
            rows = [
                measures.durations(spans),
                measures.latenesses(spans),
                measures.end_to_end(messages),
                measures.deliveries(messages),
            ]
            self._write(_union(rows), "minutes", number)
            self._write(measures.examples(messages), "examples", number)
            self._write(measures.errors(spans), "errors", number)
        finally:
            messages.unpersist()

    def _commit(self, run: AggregationResult, keys: Iterable[str], *, whole: bool) -> None:
        content = {"spans": run.spans, "newest_us": run.newest_us, "counted": run.batches}
        self._runs.put(f"{run.number:010}", {"batches": sorted(keys), "whole": whole, **content})

    def _names(self) -> list[str]:
        """The runs that count, in order."""
        names = self._runs.names()
        for i, name in reversed(list(enumerate(names))):
            if self._runs.get(name)["whole"]:
                return names[i:]
        return names

    def _drop_before(self, number: int) -> None:
        """Of runs that a whole one stands for; also those that a killed job has left."""
        for name in self._runs.names():
            if int(name) < number:
                self._runs.remove(name)
        for table in TABLES:
            for folder in (self._lake / table).glob("run=*"):
                if int(folder.name.partition("=")[2]) < number:
                    shutil.rmtree(folder)

    def _write(self, rows: DataFrame, table: str, number: int) -> None:
        path = self._lake / table / f"run={number:010}"
        rows.repartition(1).write.mode("overwrite").option("compression", "zstd").parquet(str(path))
        sync_table(path)  # the run's commit is durable, and the runs before it may be dropped then

    def _live(self, spark: SparkSession, table: str, schema: str) -> DataFrame:
        """Rows of committed runs; where a minute was computed again those of the newest run."""
        runs = [self._lake / table / f"run={name}" for name in self._names()]
        paths = [str(path) for path in runs if path.is_dir()]
        if len(paths) < len(runs) and table not in _NEWER_TABLES:
            raise Corrupt(
                f"{self._lake / table}: a folder of a run is gone, whose batches _runs says are "
                "counted: put it back, or count again what is landed (report --recompute of "
                "python -m duemq_analytics)",
                field="lake",
                value=str(self._lake),
            )
        if not paths:
            return spark.createDataFrame([], schema)
        base = str(self._lake / table)
        reader = spark.read.schema(f"{schema}, run bigint").option("basePath", base)
        again = F.lit(table == "examples")
        if table == "minutes":
            again = F.col("measure").isin(*measures.OF_MESSAGES)
        newest = F.max("run").over(Window.partitionBy("bucket_ts", again))
        rows = reader.parquet(*paths).withColumns({"newest": newest, "again": again})
        return rows.where(~F.col("again") | (F.col("run") == F.col("newest"))).drop(
            "run", "newest", "again"
        )


def affected(new: DataFrame, around: DataFrame) -> list[int]:
    """The minutes, Unix µs, of all messages that `new` changes.

    A call beyond the horizon changes none.  Its message's minute would be computed of what is near
    the call: too little.
    """
    known = new.where(
        F.col("message_id").isNotNull() & F.col("operation").isin("send", "process")
    ).select("topic", "message_id", "operation", F.unix_micros("start_ts").alias("start_us"))
    sends = between_ids(around.where(F.col("operation") == "send"), known).select(
        F.col("topic").alias("sent_topic"),
        F.col("message_id").alias("sent_id"),
        measures.expected_us().alias("expected_us"),
        measures.expected_minute().alias("minute_us"),
    )
    changes = (
        (F.col("sent_topic") == F.col("topic"))
        & (F.col("sent_id") == F.col("message_id"))
        & (
            (F.col("operation") == "send")
            | measures.in_time(F.col("start_us"), F.col("expected_us"))
        )
    )
    found = sends.where(F.col("minute_us").isNotNull()).join(known, changes, "left_semi")
    rows = found.select("minute_us").distinct().toArrow()
    return sorted(rows.column("minute_us").to_pylist())


def between_ids(spans: DataFrame, of: DataFrame) -> DataFrame:
    """Spans whose message ids are between the first and the last one of other spans.

    For a reader of Parquet, which passes over what has others: ids mostly grow with time.
    """
    rows = of.agg(F.min("message_id").alias("first"), F.max("message_id").alias("last")).toArrow()
    first, last = (rows.column(name)[0].as_py() for name in ("first", "last"))
    if first is None:
        return spans.where(F.lit(False))
    return spans.where(F.col("message_id").between(first, last))


def near(files: Iterable[File], new: Iterable[File]) -> list[File]:
    """Those with spans of the minutes in which messages with spans in `new` can be expected.

    Such a minute is at most a horizon away, and what belongs to it another one.
    """
    reach = 2 * measures.HORIZON_S * 1_000_000 + measures.US_PER_MINUTE
    begins: list[int] = []
    ends: list[int] = []
    for begin, end in sorted((file.first_us - reach, file.last_us + reach) for file in new):
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)

    def is_near(file: File) -> bool:
        i = bisect_right(begins, file.last_us) - 1
        return i >= 0 and file.first_us <= ends[i]

    return [file for file in files if is_near(file)]


def _union(frames: Sequence[DataFrame]) -> DataFrame:
    first, *others = frames
    for frame in others:
        first = first.unionByName(frame)
    return first
