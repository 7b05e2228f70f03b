"""What a lake asks of the table its spans lie in; `parquet_spans` is one.

A table format with transactions of its own (Delta, Iceberg) can take its place: a batch is one
transaction that replaces the rows of its key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession

Ends = dict[str, dict[str, int]]
"""Broker → queue → the offset after the last one landed, as option startingOffsets takes them."""

TopicEnds = dict[str, Ends]
"""By the topic's id, which is another one once it was made anew; `NOT_TOLD`: of any."""

NOT_TOLD = "0"


@dataclass(frozen=True)
class File:
    """Spans of one hour."""

    path: str
    """Beneath the lake's folder."""
    rows: int
    bytes: int
    first_us: int
    last_us: int
    """Earliest and latest start of a span, Unix microseconds."""


@dataclass(frozen=True)
class Batch:
    """What one micro-batch of the landing job has written."""

    key: str
    """Of the query and the batch: who writes it again replaces it."""
    files: tuple[File, ...]
    quarantine: tuple[str, ...]
    ends: Ends
    """Of the queues that it read."""
    undecodable: int
    plan: str = ""
    """Names the messages that it was to be of; "": not told (an older version)."""
    topic_ids: Mapping[str, int] = field(default_factory=dict)
    """Broker → of which topic of this name its offsets are; not named: not told (likewise)."""

    @property
    def spans(self) -> int:
        """Landed in it."""
        return sum(file.rows for file in self.files)

    @property
    def topic_ends(self) -> TopicEnds:
        """`ends` by topic."""
        found: TopicEnds = {}
        for broker, queues in self.ends.items():
            found.setdefault(str(self.topic_ids.get(broker, 0)), {})[broker] = queues
        return found

    def as_json(self) -> dict[str, Any]:
        """Of which `of_json` makes it again."""
        return asdict(self)

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Batch:
        """The inverse of `as_json`."""
        return cls(
            content["key"],
            tuple(File(**each) for each in content["files"]),
            tuple(content["quarantine"]),
            content["ends"],
            content["undecodable"],
            content.get("plan", ""),
            content.get("topic_ids", {}),
        )


@dataclass(frozen=True)
class Compacted:
    """What a compaction has done."""

    files_before: int
    files_after: int
    expired: int
    """Files that were older than what is kept."""

    def __add__(self, then: Compacted) -> Compacted:
        """Of both, one after the other."""
        before = self.files_before - self.files_after + then.files_before
        return Compacted(before, then.files_after, self.expired + then.expired)


class SpanTable(Protocol):
    """Spans as they were landed, and what could not be decoded."""

    def land(
        self,
        key: str,
        messages: DataFrame,
        plan: str = "",
        topic_ids: Mapping[str, int] | None = None,
    ) -> Batch:
        """Writes the spans of trace messages (broker, queue, offset, body, store_ts) as one batch.

        All of it or nothing, in place of an earlier batch of this key.  If that is of the same
        `plan` it stays as it is: what it has landed may be gone from the topic by now.
        """

    def batches(self) -> list[Batch]:
        """All that is there, in the order of landing within a query."""

    def read(self, spark: SparkSession, batches: Collection[str]) -> DataFrame:
        """The spans of batches, by their keys."""

    def topic_ends(self) -> TopicEnds:
        """How far the trace topic, and earlier ones of its name, have been landed."""

    def expire(self, settled: Collection[str], keep_from: datetime) -> Compacted:
        """Drops hours of `settled` batches that end before `keep_from`, and merges nothing.

        It needs next to no space.
        """

    def compact(
        self, spark: SparkSession, settled: Collection[str], keep_from: datetime | None
    ) -> Compacted:
        """Merges small files of `settled` batches; drops hours that end before `keep_from`.

        Safe beside a landing job.  A batch that is not settled is left as it is.
        """

    def undecodable(self, since: datetime | None) -> int:
        """Messages that are no spans and are still there: of hours that had not ended by `since`.

        None: of all.
        """


def merged_topic_ends(ends: Iterable[TopicEnds]) -> TopicEnds:
    """The furthest offsets of all, topic by topic."""
    found: dict[str, list[Ends]] = {}
    for each in ends:
        for topic_id, of_topic in each.items():
            found.setdefault(topic_id, []).append(of_topic)
    return {topic_id: merged_ends(of_topic) for topic_id, of_topic in found.items()}


def merged_ends(ends: Iterable[Ends]) -> Ends:
    """The furthest offsets of all."""
    found: Ends = {}
    for each in ends:
        for broker, queues in each.items():
            known = found.setdefault(broker, {})
            for queue, offset in queues.items():
                known[queue] = max(known.get(queue, 0), offset)
    return found
