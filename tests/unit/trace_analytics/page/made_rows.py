"""Rows as the aggregations answer them."""

from datetime import UTC, datetime, timedelta

from duemq_analytics.answers.percentiles import CURVE

MINUTE = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def bucket(number, length_s=60):
    """The bucket of this number; None: all of the time."""
    if number is None:
        return {"bucket_s": 0, "bucket_ts": None}
    return {"bucket_s": length_s, "bucket_ts": MINUTE + timedelta(seconds=number * length_s)}


def times(p99):
    """Percentiles that fit together."""
    curve = [p99 * percentile / 99 for percentile in CURVE]
    found = {f"p{percentile}_ms": curve[CURVE.index(percentile)] for percentile in (50, 95, 99)}
    return {**found, "max_ms": p99 * 1.5, "curve": curve}


def operation(name, number, group=None, *, topic="orders", messages=60, errors=0, p99=9.0, **more):
    row = {"topic": topic, "operation": name, "consumer_group": group, "spans": messages}
    row |= {"messages": messages, "errors": errors, "error_rate": errors / messages}
    return row | bucket(number) | {"retries": 0, "dead_letters": 0} | times(p99) | more


def end_to_end(number, group="g", *, topic="orders", messages=60, p99=20.0):
    row = {"topic": topic, "consumer_group": group, "messages": messages, "repeated": 0}
    return row | bucket(number) | times(p99)


def lateness(number, stage="fire", group=None, *, topic="later", messages=60, early=0, p99=4.0):
    row = {"topic": topic, "stage": stage, "consumer_group": group}
    return row | {"messages": messages, "early": early} | bucket(number) | times(p99)


def delivery(topic="orders", messages=60, unreceived=0, twice=0):
    row = {"topic": topic, "messages": messages, "unreceived": unreceived, "twice": twice}
    return row | bucket(None)


def example(kind, message_id, group=None, us=None, done=0, topic="orders"):
    row = {"kind": kind, "topic": topic, "consumer_group": group, "message_id": message_id}
    return row | {
        "bucket_ts": MINUTE,
        "sent_ts": MINUTE + timedelta(seconds=1),
        "us": us,
        "done": done,
    }
