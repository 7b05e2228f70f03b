"""What is counted of spans, by minute, so that it can be added up later.

    bucket_ts · topic · operation · consumer_group · measure     the key
    spans, messages, errors, retries, dead_letters,              sums
    early, repeated, unreceived, twice
    max_us, sketch                                               largest value, KLL sketch of all

duration    minute of the span's start; how long it took
lateness    minute of the due time; fire: stored - due, process: first call began - due; it weighs
            as many messages as the span stands for
end_to_end  minute in which the message was expected; send to the group's first call, of messages
            without a due time
delivery    likewise; no value: `messages` that were accepted, those that nobody received, and those
            that a group has done more than once (`twice`)

A message is expected when it is sent or, delayed, due.  Duration and lateness are of single spans:
rows of several runs add up.  The other two are of whole messages, whose spans come in any order:
a minute is computed again from the spans when one of its messages has new ones.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from duemq_analytics.answers import definitions
from duemq_analytics.answers.buckets import bucketed
from duemq_analytics.answers.errors import errors as kinds_of_error
from duemq_analytics.answers.percentiles import CURVE

US_PER_MINUTE = 60_000_000
_NS_PER_US = 1_000
_US_PER_MS = 1_000

HORIZON_S = 3_600
"""A message that no callback has had so long after it was expected was not received: later calls
do not count for `end_to_end` and `delivery`, and what is delayed by more is not looked after."""

_HORIZON_US = HORIZON_S * 1_000_000

SKETCH_K = 400
"""Of KLL: ranks are right to 0.7 % (99 times of 100), in at most 5 KB."""

WEIGHT_MAX = 65_536
"""One span counts no more often in a sketch, whatever it claims; sums have all."""

EXAMPLES_MAX = 20
"""Of a kind in a minute."""

KINDS = ("slowest", "latest", "suspect", "twice")
"""Of examples: without a due time, longest from sending to first call; called longest after the due
time; received by nobody; done by a group more than once.  A message is among a kind's once."""

EXAMPLES_SHOWN = 20
"""Of a kind in a report."""

GRACE_S = 300
"""A message is a suspect when it was expected so long before the newest span."""

KEY = ("topic", "operation", "consumer_group", "measure")
SUMS = (
    "spans",
    "messages",
    "errors",
    "retries",
    "dead_letters",
    "early",
    "repeated",
    "unreceived",
    "twice",
)
OF_MESSAGES = ("end_to_end", "delivery")
"""Measures whose minutes are computed anew: the newest run's rows are the ones that count."""

MINUTES_SCHEMA = (
    "bucket_ts timestamp, topic string, operation string, consumer_group string, measure string, "
    + ", ".join(f"{name} bigint" for name in SUMS)
    + ", max_us bigint, sketch binary"
)
EXAMPLES_SCHEMA = (
    "bucket_ts timestamp, kind string, topic string, consumer_group string, message_id string,"
    " sent_ts timestamp, us bigint, done bigint"
)
ERRORS_SCHEMA = (
    "bucket_ts timestamp, topic string, operation string, consumer_group string,"
    " error_type string, errors bigint, last_ts timestamp, message_id string"
)


def errors(spans: DataFrame) -> DataFrame:
    """ERRORS_SCHEMA of spans; rows of several runs add up."""
    return kinds_of_error(spans).drop("bucket_s")


def durations(spans: DataFrame) -> DataFrame:
    """Measure `duration` of spans."""
    duration_us = (F.col("duration_ns") / _NS_PER_US).cast("bigint")
    rows = spans.where(definitions.has_duration()).select(
        _minute(F.unix_micros("start_ts")).alias("minute_us"),
        "topic",
        "operation",
        "consumer_group",
        definitions.weight().alias("weight"),
        definitions.counted(definitions.failed()).alias("error"),
        definitions.retry().alias("retry"),
        definitions.dead_letter().alias("dead_letter"),
        duration_us.alias("us"),
    )
    grouped = rows.groupBy("minute_us", "topic", "operation", "consumer_group").agg(
        F.count(F.lit(1)).alias("spans"),
        F.sum("weight").alias("messages"),
        F.sum("error").alias("errors"),
        F.sum("retry").alias("retries"),
        F.sum("dead_letter").alias("dead_letters"),
        F.max("us").alias("max_us"),
        sketch("us"),
    )
    return as_minutes(grouped, "duration")


def latenesses(spans: DataFrame) -> DataFrame:
    """Measure `lateness` of fire spans and of first calls."""
    rows = spans.where(definitions.has_lateness()).select(
        _minute(F.col("due_ms") * _US_PER_MS).alias("minute_us"),
        "topic",
        "operation",
        "consumer_group",
        "lateness_ms",
        definitions.weight().alias("weight"),
    )
    # KLL knows no weights: a value comes as often as it weighs, its sums with the first only.
    times = F.array_repeat(
        F.lit(0), F.least(F.greatest("weight", F.lit(1)), F.lit(WEIGHT_MAX)).cast("int")
    )
    repeated = rows.select("*", F.posexplode(times).alias("again", "nothing"))
    whole = F.when(F.col("again") == 0, F.col("weight")).otherwise(0)
    grouped = repeated.groupBy("minute_us", "topic", "operation", "consumer_group").agg(
        F.sum((F.col("again") == 0).cast("bigint")).alias("spans"),
        F.sum(whole).alias("messages"),
        F.sum(definitions.early(whole)).alias("early"),
        F.max(F.col("lateness_ms") * _US_PER_MS).alias("max_us"),
        sketch(F.col("lateness_ms") * _US_PER_MS),
    )
    return as_minutes(grouped, "lateness")


def expected_us() -> Column:
    """Of a send span: when its message should come."""
    sent = F.unix_micros("start_ts")
    return F.greatest(sent, F.coalesce(F.col("due_ms") * _US_PER_MS, sent))


def in_time(start_us: Column, expected_us: Column) -> Column:
    """Whether a call counts for its message: within the horizon of when that was expected."""
    return F.abs(start_us - expected_us) <= _HORIZON_US


def expected_minute() -> Column:
    """The minute that a message's figures are of, from its send span; null: not looked after."""
    looked_after = expected_us() - F.unix_micros("start_ts") <= _HORIZON_US
    return F.when((F.col("operation") == "send") & looked_after, _minute(expected_us()))


def sends(spans: DataFrame, minutes: Sequence[int] | None = None) -> DataFrame:
    """Send spans of the messages that are expected in these minutes (Unix µs; None: all)."""
    minute = expected_minute()
    if minutes is None:
        return spans.where(minute.isNotNull())
    found = spans.where(minute.isin(list(minutes)))
    if not minutes:
        return found
    first, last = min(minutes), max(minutes) + US_PER_MINUTE
    # The same in terms that Parquet has statistics of: the rest of the files is passed over.
    at_once = F.col("due_ms").isNull() & (F.col("start_ts") >= _time(first))
    return found.where(_started(first, last) & (F.col("due_ms").isNotNull() | at_once))


def _started(first_us: int, last_us: int) -> Column:
    """From a horizon before one time to the other."""
    return F.col("start_ts").between(_time(first_us - _HORIZON_US), _time(last_us))


def _time(us: int) -> Column:
    return F.timestamp_micros(F.lit(us))


def messages(spans: DataFrame, minutes: Sequence[int] | None = None) -> DataFrame:
    """One row a message expected in these minutes (Unix µs; None: all) and group that received it.

    In broadcast, one a member that did.  Or one row with `first_us` null where nobody did.
    minute_us, topic, message_id, consumer_group, sent_us, due_us, accepted, first_us (first call),
    calls, done (calls that did not fail).
    """
    known = spans.where(F.col("message_id").isNotNull() & F.col("topic").isNotNull())
    grouped = (
        sends(known, minutes)
        .groupBy("topic", "message_id")
        .agg(
            F.min(F.unix_micros("start_ts")).alias("sent_us"),
            F.min(expected_us()).alias("expected_us"),
            F.max(definitions.own_due_ms() * _US_PER_MS).alias("due_us"),
            F.max(~definitions.failed()).alias("accepted"),
        )
    )
    if minutes:
        known = known.where(_started(min(minutes), max(minutes) + US_PER_MINUTE + _HORIZON_US))
    calls = known.where(F.col("operation") == "process").select(
        F.col("topic").alias("called_topic"),
        F.col("message_id").alias("called_id"),
        "consumer_group",
        F.unix_micros("start_ts").alias("start_us"),
        definitions.own_due_ms().alias("call_due_ms"),
        definitions.counted(~definitions.failed()).alias("did"),
        definitions.member().alias("member"),
    )
    of_the_message = (
        (F.col("topic") == F.col("called_topic"))
        & (F.col("message_id") == F.col("called_id"))
        & in_time(F.col("start_us"), F.col("expected_us"))
    )
    return (
        grouped.join(calls, of_the_message, "left")
        .groupBy(
            *("topic", "message_id", "consumer_group", "member"),
            *("sent_us", "expected_us", "accepted"),
        )
        .agg(
            F.max("due_us").alias("send_due_us"),
            F.max(F.col("call_due_ms") * _US_PER_MS).alias("call_due_us"),
            F.min("start_us").alias("first_us"),
            F.count("start_us").alias("calls"),
            F.coalesce(F.sum("did"), F.lit(0)).alias("done"),
        )
        .withColumns(
            {
                "minute_us": _minute(F.col("expected_us")),
                # It may have been rescheduled since it was sent.
                "due_us": F.coalesce("call_due_us", "send_due_us"),
            }
        )
        .drop("send_due_us", "call_due_us", "expected_us", "member")
    )


def end_to_end(messages: DataFrame) -> DataFrame:
    """Measure `end_to_end` of messages."""
    us = F.col("first_us") - F.col("sent_us")
    grouped = (
        messages.where(F.col("first_us").isNotNull() & F.col("due_us").isNull())
        .groupBy("minute_us", "topic", F.lit("process").alias("operation"), "consumer_group")
        .agg(
            F.sum("calls").alias("spans"),
            F.count(F.lit(1)).alias("messages"),
            F.sum(definitions.repeated(F.col("calls"))).alias("repeated"),
            F.max(us).alias("max_us"),
            sketch(us),
        )
    )
    return as_minutes(grouped, "end_to_end")


def deliveries(messages: DataFrame) -> DataFrame:
    """Measure `delivery` of messages."""
    nobody = F.col("first_us").isNull()
    per_message = messages.groupBy("minute_us", "topic", "message_id").agg(
        F.max("accepted").alias("accepted"),
        F.max("first_us").alias("first_us"),
        F.max("done").alias("done"),
    )
    grouped = (
        per_message.where(F.col("accepted") | ~nobody)
        .groupBy(
            "minute_us",
            "topic",
            F.lit("send").alias("operation"),
            F.lit(None).cast("string").alias("consumer_group"),
        )
        .agg(
            F.count(F.lit(1)).alias("messages"),
            F.sum(nobody.cast("bigint")).alias("unreceived"),
            F.sum((F.col("done") > 1).cast("bigint")).alias("twice"),
        )
    )
    return as_minutes(grouped, "delivery")


def examples(messages: DataFrame) -> DataFrame:
    """EXAMPLES_MAX messages a minute and kind.

    bucket_ts, kind, topic, consumer_group, message_id, sent_ts, us (see KINDS; null for suspects),
    done (how often the group has done it).
    """
    called, delayed = F.col("first_us").isNotNull(), F.col("due_us").isNotNull()
    waited = F.col("first_us") - F.col("sent_us")
    late = F.col("first_us") - F.col("due_us")
    kinds = {
        "slowest": (called & ~delayed, waited),
        "latest": (called & delayed, late),
        "suspect": (~called & F.col("accepted"), F.lit(None).cast("bigint")),
        "twice": (F.col("done") > 1, waited),
    }
    found = F.array_compact(
        F.array(
            *(
                F.when(chosen, F.struct(F.lit(kind).alias("kind"), us.alias("us")))
                for kind, (chosen, us) in kinds.items()
            )
        )
    )
    of_groups = messages.select("*", F.inline(found))
    # Of many groups, the one that had it last stands for the message.
    worst = F.struct("us", "consumer_group", "done")
    key = ("minute_us", "kind", "topic", "message_id", "sent_us")
    each = of_groups.groupBy(*key).agg(F.max(worst).alias("worst")).select(*key, "worst.*")
    order = Window.partitionBy("minute_us", "kind").orderBy(
        F.desc_nulls_last("us"), "topic", "message_id"
    )
    rows = each.withColumn("rank", F.row_number().over(order))
    return rows.where(F.col("rank") <= EXAMPLES_MAX).select(
        F.timestamp_micros("minute_us").alias("bucket_ts"),
        "kind",
        "topic",
        "consumer_group",
        "message_id",
        F.timestamp_micros("sent_us").alias("sent_ts"),
        "us",
        "done",
    )


def settled(newest_us: int) -> Column:
    """Of a minute's row: whether its messages should have come by the newest span (Unix µs)."""
    last_us = newest_us - GRACE_S * 1_000_000 - US_PER_MINUTE
    return F.col("bucket_ts") <= F.timestamp_micros(F.lit(last_us))


def unreceived_settled(minutes: DataFrame, newest_us: int) -> DataFrame:
    """Minutes with `unreceived` only where it says something."""
    lost = F.when(settled(newest_us), F.col("unreceived")).otherwise(0)
    return minutes.withColumn("unreceived", lost)


def picked(examples: DataFrame, newest_us: int) -> DataFrame:
    """EXAMPLES_SHOWN of each kind, in order: the slowest; of suspects those sent last."""
    wanted = (F.col("kind") != "suspect") | settled(newest_us)
    slow = F.when(F.col("kind").isin("slowest", "latest"), F.col("us"))
    order = [F.desc_nulls_last(slow), F.desc("sent_ts"), F.col("topic"), F.col("message_id")]
    rank = F.row_number().over(Window.partitionBy("kind").orderBy(*order))
    rows = examples.where(wanted).withColumn("rank", rank)
    return rows.where(F.col("rank") <= EXAMPLES_SHOWN).orderBy("kind", "rank").drop("rank")


def merged(minutes: DataFrame, lengths_s: Sequence[int]) -> DataFrame:
    """Minutes added up to buckets of these lengths (WHOLE_S: all of them).

    bucket_s, bucket_ts, the key, SUMS, max_us, sketch, curve_us: the values at the percentiles
    CURVE; null where a measure has no values.
    """
    ranks = F.array(*(F.lit(percentile / 100) for percentile in CURVE))
    return (
        minutes.select(bucketed(F.col("bucket_ts"), lengths_s), *KEY, *SUMS, "max_us", "sketch")
        .groupBy("bucket_s", "bucket_ts", *KEY)
        .agg(
            *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in SUMS),
            F.max("max_us").alias("max_us"),
            F.kll_merge_agg_bigint("sketch", SKETCH_K).alias("sketch"),
            F.count("sketch").alias("sketches"),
        )
        .withColumn(
            "curve_us",
            F.when(F.col("sketches") > 0, F.kll_sketch_get_quantile_bigint("sketch", ranks)),
        )
        .withColumn("sketch", F.when(F.col("sketches") > 0, F.col("sketch")))
        .drop("sketches")
    )


def sketch(value: Column | str) -> Column:
    """For `agg`: the KLL sketch of whole microseconds."""
    return F.kll_sketch_agg_bigint(value, F.lit(SKETCH_K)).alias("sketch")


def as_minutes(grouped: DataFrame, measure: str) -> DataFrame:
    """The columns of MINUTES_SCHEMA; sums that a measure does not have are 0."""
    there = set(grouped.columns)
    return grouped.select(
        F.timestamp_micros("minute_us").alias("bucket_ts"),
        "topic",
        "operation",
        "consumer_group",
        F.lit(measure).alias("measure"),
        *(F.col(name) if name in there else F.lit(0).cast("bigint").alias(name) for name in SUMS),
        F.col("max_us") if "max_us" in there else F.lit(None).cast("bigint").alias("max_us"),
        F.col("sketch") if "sketch" in there else F.lit(None).cast("binary").alias("sketch"),
    )


def _minute(us: Column) -> Column:
    return us - F.pmod(us, F.lit(US_PER_MINUTE))
