"""The spans of single messages, in two looks: their own, then those of the frames they were in.

Only sends and callbacks have a message's id; what a frame's spans name is creation contexts and the
place where it lies, which the first look tells (see the package `waterfall`).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from duemq.tracing.attributes import LAST_OFFSET
from duemq_analytics.waterfall.journeys import Times
from duemq_analytics.waterfall.places import Context, Place

COLUMNS = (
    *("trace_id", "span_id", "parent_span_id", "links", "kind", "operation", "topic", "message_id"),
    *("start_ns", "duration_ns", "status", "error_type", "service", "instance", "consumer_group"),
    *("broker", "queue", "queue_offset", "batch_count", "sampled_count", "attributes", "attempt"),
    *("due_ms", "lateness_ms"),
)
"""What is drawn, and what it is found by: each more is read of all spans of those hours."""

OF_A_MESSAGE_MAX = 200
FRAMES_MAX = 2_000
"""Spans that a look answers, the earliest first."""

_NS_PER_US = 1_000


def own_spans(spans: DataFrame, message_ids: Collection[str]) -> DataFrame:
    """Those with the ids; OF_A_MESSAGE_MAX of each."""
    order = Window.partitionBy("message_id").orderBy("start_ns", "span_id")
    found = spans.select(*COLUMNS).where(F.col("message_id").isin(list(message_ids)))
    ranked = found.withColumn("rank", F.row_number().over(order))
    return ranked.where(F.col("rank") <= OF_A_MESSAGE_MAX).drop("rank")


def frame_spans(
    spans: DataFrame,
    contexts: Collection[Context],
    places: Collection[Place],
    times: Collection[Times],
) -> DataFrame:
    """Those without an id that may be of messages with these contexts, which lay there.

    They began at one of the times.  `waterfall.journeys` says which are.
    """
    # Of `start_ts` Parquet has statistics: a reader passes over what is of other times.
    begun = reduce(or_, (_began(*each) for each in times))
    found = reduce(or_, [_names(contexts), *map(_may_cover, places)])
    frames = spans.select(*COLUMNS).where(begun & F.col("message_id").isNull() & found)
    return frames.orderBy("start_ns", "span_id").limit(FRAMES_MAX)


def _began(first_ns: int, last_ns: int) -> Column:
    first, last = (F.timestamp_micros(F.lit(ns // _NS_PER_US)) for ns in (first_ns, last_ns))
    return F.col("start_ts").between(first, last)


def _names(contexts: Collection[Context]) -> Column:
    """Its parent or one of its links is one of them."""
    wanted = [trace_id + span_id for trace_id, span_id in contexts]
    span_ids = [span_id for _, span_id in contexts]

    def named(trace_id: Column, span_id: Column) -> Column:
        # Ids of spans alone tell most apart, without making a text a row.
        return span_id.isin(span_ids) & F.concat(trace_id, span_id).isin(wanted)

    child = named(F.col("trace_id"), F.col("parent_span_id"))
    linked = F.exists("links", lambda link: named(link["trace_id"], link["span_id"]))
    return F.coalesce(child, F.lit(False)) | F.coalesce(linked, F.lit(False))


def _may_cover(place: Place) -> Column:
    """There are more messages in it than its span names, and the place is among theirs."""
    first, count = F.col("queue_offset"), F.col("batch_count")
    # `try`: whoever may send writes what he likes into attributes, and offsets of any size.
    told = F.col("attributes")[LAST_OFFSET].try_cast("bigint")
    last = F.coalesce(told, F.try_add(first, count - 1))
    return F.coalesce(
        (F.coalesce("sampled_count", count) > F.coalesce(F.size("links"), F.lit(0)))
        & (F.col("queue") == place.queue)
        & (first <= place.offset)
        & (last >= place.offset)
        & (F.col("broker") == place.broker)
        & (F.col("topic") == place.topic),
        F.lit(False),
    )
