"""The report of a topic and the report of a lake give the same numbers."""

import random

import pytest

from duemq_analytics.answers.buckets import MINUTE_S
from duemq_analytics.answers.end_to_end import end_to_end, journeys
from duemq_analytics.answers.lateness import lateness
from duemq_analytics.answers.operations import operations
from duemq_analytics.lake import measures
from tests.spark.test_aggregates import life
from tests.spark.test_jobs import frame, process, send, span

pytestmark = [pytest.mark.long, pytest.mark.spark]

DUE_MS = 1_700_000_100_000


@pytest.fixture(scope="module")
def spans(spark):
    """Messages of all kinds, all called within the lake's horizon, and what is unusual."""
    rng = random.Random(7)
    lives = [life(rng, number) for number in range(300)]
    near = [rows for rows in lives if _length_ms(rows) < measures.HORIZON_S * 1_000]
    assert 100 < len(near) < len(lives)
    late = {"due_ms": DUE_MS, "batch_count": 3}
    unusual = [
        span("fire", 10, lateness_ms=-2, **late),
        span("fire", 11, lateness_ms=5, topic=None, **late),
        send("unset", 20, status=None),
        process("unset", 30, status=None, attempt=None),
        span("store", 40, batch_count=64, sampled_count=2),
    ]
    made = frame(spark, *(row for rows in near for row in rows), *unusual).cache()
    yield made
    made.unpersist()


def _length_ms(rows):
    starts = [row["start_ns"] // 1_000_000 for row in rows]
    return max(starts) - min(starts)


def _topic_s(table, names):
    """Numbers by minute, topic, operation and group."""
    return {
        (r["bucket_ts"], r["topic"], r.get("operation") or r.get("stage"), r["consumer_group"]): {
            **{name: r[name] for name in names},
            "max_us": round(r["max_ms"] * 1_000),
        }
        for r in table.where(table.bucket_s == MINUTE_S).toArrow().to_pylist()
    }


def _lake_s(minutes, names):
    return {
        (r["bucket_ts"], r["topic"], r["operation"], r["consumer_group"]): {
            name: r[name] for name in (*names, "max_us")
        }
        for r in minutes.toArrow().to_pylist()
    }


def test_operations_are_the_same(spans):
    names = ("spans", "messages", "errors")
    found = _topic_s(operations(spans), names)
    # The lake has whole microseconds, cut off.
    lake = _lake_s(measures.durations(spans), names)
    assert sum(row["errors"] for row in found.values()) > 0
    assert _without_max(found) == _without_max(lake)
    assert all(0 <= found[key]["max_us"] - lake[key]["max_us"] <= 1 for key in found)


def _without_max(rows):
    return {key: {k: v for k, v in row.items() if k != "max_us"} for key, row in rows.items()}


def test_lateness_is_the_same(spans):
    names = ("messages", "early")
    found = _topic_s(lateness(spans), names)
    assert sum(row["early"] for row in found.values()) == 3
    assert found == _lake_s(measures.latenesses(spans), names)


def test_end_to_end_is_the_same(spans):
    names = ("messages", "repeated")
    table = end_to_end(journeys(spans))
    found = {
        (minute, topic, "process", group): row
        for (minute, topic, _, group), row in _topic_s(table, names).items()
    }
    assert sum(row["repeated"] for row in found.values()) > 0
    assert found == _lake_s(measures.end_to_end(measures.messages(spans)), names)
