"""What counts as what: the columns that a topic's report and a lake's are both made of.

Every number of a report has its definition here or is a plain count, sum or maximum of these.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from duemq.tracing.attributes import BROADCAST


def weight() -> Column:
    """How many messages a span stands for: where there is a sampler, the sampled ones."""
    return F.coalesce(F.col("sampled_count"), F.col("batch_count"), F.lit(1))


def failed() -> Column:
    """Whether a span ended with an error; one without a status did not."""
    return so(F.col("status") == "ERROR")


def has_duration() -> Column:
    """Spans that operations are counted of."""
    return F.col("topic").isNotNull()


def has_lateness() -> Column:
    """Spans that lateness is counted of: fires, and of a message's calls the first."""
    late = (F.col("operation") == "fire") | ((F.col("operation") == "process") & first_call())
    return F.col("topic").isNotNull() & F.col("lateness_ms").isNotNull() & late


def first_call() -> Column:
    """Of a process span: whether its message came for the first time."""
    return F.coalesce(F.col("attempt"), F.lit(0)) == 0


def own_due_ms() -> Column:
    """The due time that the message was sent with, Unix ms; a retry has one of its own."""
    return F.when((F.col("operation") == "send") | first_call(), F.col("due_ms"))


def early(messages: Column) -> Column:
    """For `sum`: of a span with lateness, so many `messages` if it was before its due time."""
    return F.when(F.col("lateness_ms") < 0, messages).otherwise(0)


def retry() -> Column:
    """For `sum`: 1 or 0, whether a span is a call after its message's first one."""
    return counted((F.col("operation") == "process") & (F.col("attempt") > 0))


def dead_letter() -> Column:
    """For `sum`: 1 or 0, whether a span is of giving a message up."""
    dead = F.coalesce(F.col("attributes")["duemq.dead_letter"], F.lit("false")) == "true"
    return counted((F.col("operation") == "settle") & dead)


def member() -> Column:
    """Of a call in broadcast: whose, for each member of the group gets every message; else null."""
    return F.when(F.col("attributes")[BROADCAST] == "true", F.coalesce("client_id", F.lit("")))


def repeated(calls: Column) -> Column:
    """Whether a group (in broadcast: a member) had a message more than once: 1 or 0."""
    return counted(calls > 1)


def so(condition: Column) -> Column:
    """False where a column is null."""
    return F.coalesce(condition, F.lit(False))


def counted(condition: Column) -> Column:
    """For `sum`: 1 or 0; where a column is null it is not so."""
    return so(condition).cast("bigint")
