"""Small files of one hour become one: what a compaction writes before its commit.

A task a new file; Arrow reads and writes it by row groups, so that the task's memory is bounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from duemq_analytics.lake.parquet_files import ParquetFile, merged
from duemq_analytics.lake.span_table import File
from duemq_analytics.lake.span_writer import QUARANTINE, US_PER_HOUR, hour_of
from duemq_analytics.source import schema

FILE_BYTES = 128 * 1024 * 1024
"""A compaction's files are about this large, at most; larger ones are left alone."""

COMPACTED = "compacted"
"""Begins their names."""

COLUMNS = {"spans": schema.SPANS, "quarantine": QUARANTINE}
"""By the table, the first folder of a file's path."""


def merge(
    spark: SparkSession, lake: Path, files: Sequence[File], number: int
) -> tuple[list[File], list[str]]:
    """The files to have, and those they replace.  `number`: of the compaction."""
    groups, left = _groups(files)
    if not groups:
        return list(files), []
    jobs = [(i, [file.path for file in group]) for i, group in enumerate(groups)]
    planned = spark.sparkContext.parallelize(jobs, len(jobs))
    write = partial(_merge_task, lake, number)
    made = {job: (path, size) for job, path, size in planned.mapPartitions(write).collect()}
    new = [
        File(
            made[i][0],
            sum(file.rows for file in group),
            made[i][1],
            min(file.first_us for file in group),
            max(file.last_us for file in group),
        )
        for i, group in enumerate(groups)
    ]
    return [*left, *new], [file.path for group in groups for file in group]


def _merge_task(
    lake: Path, number: int, jobs: Iterator[tuple[int, list[str]]]
) -> Iterator[tuple[int, str, int]]:
    """Writes one file a job, beside the first one that it replaces."""
    for job, paths in jobs:
        path = Path(paths[0]).parent / f"{COMPACTED}-{number:010}-{job:05}.parquet"
        columns = schema.arrow_schema(COLUMNS[path.parts[0]])
        file = ParquetFile(lake / path, columns)
        try:
            for table in merged((lake / each for each in paths), columns):
                file.write(table)
            size = file.finish()
        except BaseException:
            file.abandon()
            raise
        yield job, str(path), size


def _groups(files: Sequence[File]) -> tuple[list[list[File]], list[File]]:
    """Small files of one hour that become one, and those that stay; of strays on their own."""
    hours: dict[tuple[Path, bool], list[File]] = defaultdict(list)
    for file in files:
        hours[Path(file.path).parent, _is_of_its_hour(file)].append(file)
    groups: list[list[File]] = []
    left: list[File] = []
    for found in hours.values():
        group: list[File] = []
        for file in sorted(found, key=lambda file: (file.bytes, file.path)):
            if group and sum(f.bytes for f in group) + file.bytes > FILE_BYTES:
                groups.append(group)
                group = []
            group.append(file)
        groups.append(group)
    left = [group[0] for group in groups if len(group) == 1]
    return [group for group in groups if len(group) > 1], left


def _is_of_its_hour(file: File) -> bool:
    hour = hour_of(file.path)
    return hour == file.first_us // US_PER_HOUR == file.last_us // US_PER_HOUR
