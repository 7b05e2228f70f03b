"""What runs add up to, against a computation of its own in plain Python."""

import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from pyarrow import parquet

from duemq_analytics.answers.percentiles import CURVE
from duemq_analytics.lake import measures
from duemq_analytics.lake.aggregates import Aggregates, affected, between_ids
from duemq_analytics.lake.commits import Commits
from duemq_analytics.lake.parquet_spans import ParquetSpans
from duemq_analytics.lake.span_table import Batch, File
from duemq_analytics.source import schema
from tests.spark.test_jobs import T0_MS, frame, heard, process, send, span

pytestmark = pytest.mark.spark

MINUTE_MS = 60_000
GROUPS = ("a", "b")
LATE_MS = 2 * measures.HORIZON_S * 1_000
RANK_ERROR = 0.02


def life(rng, number):
    """The spans of one message: when they start is when they are, not when they come."""
    at, name = rng.randrange(20 * MINUTE_MS), f"m{number}"
    failed = rng.random() < 0.05
    delay = rng.choice([0, 0, 0, 90_000, LATE_MS])
    due = {"due_ms": T0_MS + at + delay} if delay else {}
    topic = {"topic": rng.choice(["orders", "mail"]), "error_type": f"E{number % 3}"}
    took = {"duration_ns": rng.randrange(10_000, 90_000_000)}
    found = [send(name, at, status="ERROR" if failed else "UNSET", **due, **topic, **took)]
    if delay:
        late = rng.randrange(30)
        fired = {"lateness_ms": late, "batch_count": rng.choice([None, 3])}
        found.append(span("fire", at + delay + late, **due, **topic, **fired))
    if failed and rng.random() < 0.5:
        return found
    for group in GROUPS:
        if rng.random() < 0.1:
            continue  # never received
        calls = rng.choice([1, 1, 1, 2, 3])
        for attempt in range(calls):
            waited = rng.randrange(1, 5_000) + attempt * rng.choice([10_000, LATE_MS])
            status = "ERROR" if attempt < calls - 1 else "OK"
            own = due | ({"lateness_ms": waited} if delay and not attempt else {})
            own |= {"attempt": attempt, "status": status, **topic, **took}
            found.append(process(name, at + delay + waited, group, **own))
        if rng.random() < 0.05:  # its member died before it could say so
            again = due | topic | took | {"status": "OK"}
            found.append(
                process(name, at + delay + waited + rng.choice([40, LATE_MS]), group, **again)
            )
        if rng.random() < 0.1:
            dead = {"attributes": [("duemq.dead_letter", "true")]}
            settled = {"message_id": name, "consumer_group": group, **topic, **dead}
            found.append(span("settle", at + delay + 6_000, **settled))
    return found


def independent(spans):
    """The measures as a dictionary: minute, topic, operation, group, measure → counts, values."""
    found = defaultdict(lambda: {"sums": defaultdict(int), "values": []})

    def entry(us, row, measure, operation=None, group=None):
        minute = us // 60_000_000
        key = minute, row["topic"], operation or row["operation"], group, measure
        return found[key]["sums"], found[key]["values"]

    for row in spans:
        weight = row["sampled_count"] or row["batch_count"] or 1
        group, first = row["consumer_group"], not row["attempt"]
        sums, values = entry(row["start_ns"] // 1_000, row, "duration", group=group)
        sums["spans"] += 1
        sums["messages"] += weight
        sums["errors"] += row["status"] == "ERROR"
        sums["retries"] += row["operation"] == "process" and not first
        sums["dead_letters"] += row["operation"] == "settle" and bool(row["attributes"])
        values.append(row["duration_ns"] // 1_000)
        if row["lateness_ms"] is not None and (row["operation"] == "fire" or first):
            sums, values = entry(row["due_ms"] * 1_000, row, "lateness", group=group)
            sums["spans"] += 1
            sums["messages"] += weight
            values += [row["lateness_ms"] * 1_000] * weight
    of_messages(spans, entry)
    return found


def of_messages(spans, entry):
    calls = defaultdict(lambda: defaultdict(list))
    for row in spans:
        if row["operation"] == "process":
            calls[row["message_id"]][row["consumer_group"]].append(row)
    for row in spans:
        if row["operation"] != "send":
            continue
        sent = row["start_ns"] // 1_000
        expected = max(sent, (row["due_ms"] or 0) * 1_000)
        horizon = measures.HORIZON_S * 1_000_000
        if expected - sent > horizon:
            continue
        received, twice = False, False
        for group, each in calls[row["message_id"]].items():
            starts = [call["start_ns"] // 1_000 for call in each]
            starts = [start for start in starts if start <= expected + horizon]
            done = [call for call in each if call["status"] != "ERROR"]
            twice |= sum(call["start_ns"] // 1_000 <= expected + horizon for call in done) > 1
            received = received or bool(starts)
            if starts and not row["due_ms"]:
                sums, values = entry(expected, row, "end_to_end", "process", group)
                sums["spans"] += len(starts)
                sums["messages"] += 1
                sums["repeated"] += len(starts) > 1
                values.append(min(starts) - sent)
        if row["status"] != "ERROR" or received:
            sums, _ = entry(expected, row, "delivery")
            sums["messages"] += 1
            sums["unreceived"] += not received
            sums["twice"] += twice


def landed(lake, key, rows):
    """A batch as the landing job leaves it."""
    path = f"spans/date=2023-11-14/hour=22/{key}-0.parquet"
    (lake / path).parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows, schema=schema.arrow_schema(schema.SPANS))
    parquet.write_table(table, lake / path)
    starts = [row["start_ns"] // 1_000 for row in rows]
    file = File(path, len(rows), 1, min(starts), max(starts))
    batch = Batch(key, (file,), (), {"b": {"0": 1}}, 0)
    Commits(lake / "_batches").put(key, batch.as_json())


def told(spark, aggregates):
    """Minutes merged: the same form as `independent`, with a sketch for the values."""
    rows = measures.merged(aggregates.minutes(spark), [60]).toArrow().to_pylist()
    return {
        (
            int(row["bucket_ts"].timestamp()) // 60,
            *(row[name] for name in ("topic", "operation", "consumer_group", "measure")),
        ): row
        for row in rows
    }


def require_equal(found, expected):
    assert set(found) == set(expected)
    for key, wanted in expected.items():
        row = found[key]
        sums = {name: row[name] for name in measures.SUMS if row[name]}
        assert sums == {name: n for name, n in wanted["sums"].items() if n}, key
        values = sorted(wanted["values"])
        assert row["max_us"] == (values[-1] if values else None)
        for percentile, value in zip(CURVE, row["curve_us"] or [], strict=False):
            rank = percentile / 100
            low = values[max(0, int((rank - RANK_ERROR) * len(values)) - 1)]
            high = values[min(len(values) - 1, int((rank + RANK_ERROR) * len(values)) + 1)]
            assert low <= value <= high, (key, percentile)


def require_errors(spark, aggregates, spans):
    """Kinds of error, against plain Python."""
    expected = defaultdict(list)
    for row in spans:
        if row["status"] == "ERROR":
            key = ("topic", "operation", "consumer_group", "error_type")
            minute = row["start_ns"] // 60_000_000_000
            expected[minute, *(row[name] for name in key)].append(row)
    found = defaultdict(list)
    for row in aggregates.errors(spark).toArrow().to_pylist():
        minute = int(row["bucket_ts"].timestamp()) // 60
        key = (row[name] for name in ("topic", "operation", "consumer_group", "error_type"))
        found[minute, *key].append(row)
    assert set(found) == set(expected)
    for key, rows in found.items():
        last = max(expected[key], key=lambda row: row["start_ns"])
        newest = max(rows, key=lambda row: row["last_ts"])
        assert sum(row["errors"] for row in rows) == len(expected[key])
        assert (newest["last_ts"], newest["message_id"]) == (last["start_ts"], last["message_id"])


@pytest.fixture(scope="module")
def spans():
    rng = random.Random(20_261_122)
    found = [row for number in range(400) for row in life(rng, number)]
    rng.shuffle(found)  # they come in any order: a call before its send, hours late
    return found


@pytest.mark.long
def test_runs_add_up_to_what_was_landed(spark, spans, tmp_path):
    table = ParquetSpans(tmp_path)
    aggregates = Aggregates(tmp_path, table)
    assert aggregates.update(spark).number == 0
    cuts = [0, len(spans) // 2, len(spans) // 2 + 60, len(spans)]
    for number in range(3):
        rows = spans[cuts[number] : cuts[number + 1]]
        landed(tmp_path, f"q-{number}", rows)
        run = aggregates.update(spark)
        assert (run.number, run.batches, run.spans) == (number + 1, 1, len(rows))
    assert aggregates.update(spark) == run  # nothing new
    expected = independent(spans)
    require_equal(told(spark, aggregates), expected)
    require_errors(spark, aggregates, spans)
    # Killed before its commit, a run is done again under its number.
    Commits(tmp_path / "_runs").remove(f"{run.number:010}")
    assert aggregates.update(spark) == run
    require_equal(told(spark, aggregates), expected)
    require_errors(spark, aggregates, spans)
    assert aggregates.compact(spark, None) == 3
    require_equal(told(spark, aggregates), expected)
    require_errors(spark, aggregates, spans)
    # From scratch the numbers are the same.
    assert aggregates.rebuild(spark).spans == len(spans)
    require_equal(told(spark, aggregates), expected)
    require_errors(spark, aggregates, spans)


@pytest.mark.long
def test_only_the_minutes_that_are_kept_stay(spark, tmp_path):
    """Neither those that are over nor those of a clock that is ahead, whose time never comes."""
    aggregates = Aggregates(tmp_path, ParquetSpans(tmp_path))
    years_ms = 100 * 365 * 24 * 60 * MINUTE_MS
    times = {"old": -60 * MINUTE_MS, "kept": 0, "ahead": years_ms}
    failed = {"status": "ERROR", "error_type": "E"}
    calls = [process(name, at + 10, "g", **failed) for name, at in times.items()]
    landed(tmp_path, "q-0", [*(send(name, at) for name, at in times.items()), *calls])
    aggregates.update(spark)
    begin = datetime.fromtimestamp(T0_MS / 1_000 - 120, UTC)
    assert aggregates.compact(spark, (begin, begin + timedelta(days=1))) == 1
    minute = T0_MS // MINUTE_MS
    assert {key[0] for key in told(spark, aggregates)} == {minute}
    examples = aggregates.examples(spark).toArrow().to_pylist()
    assert {row["message_id"] for row in examples} == {"kept"}
    assert [row["message_id"] for row in aggregates.errors(spark).toArrow().to_pylist()] == ["kept"]


def rows_read(frame):
    """How many rows Parquet gave to make it, and its message ids."""
    ids = [row["message_id"] for row in frame.toArrow().to_pylist()]
    leaf = frame._jdf.queryExecution().executedPlan().collectLeaves().head()
    return leaf.metrics().apply("numOutputRows").value(), ids


@pytest.mark.long
def test_a_run_reads_nothing_of_files_without_its_messages(spark, tmp_path):
    table = ParquetSpans(tmp_path)
    landed(tmp_path, "q-0", [send("a1", 0), process("a1", 10, "g"), send("a2", 20)])
    landed(tmp_path, "q-1", [send("b1", 30 * MINUTE_MS), send("b2", 30 * MINUTE_MS)])
    landed(tmp_path, "q-2", [process("b1", 31 * MINUTE_MS, "g")])
    new = table.read(spark, ["q-2"])
    near = between_ids(table.read(spark), new)
    read, ids = rows_read(near)
    assert (read, sorted(ids)) == (3, ["b1", "b1"])
    assert between_ids(table.read(spark), new.where("message_id is null")).isEmpty()

    sent = measures.sends(table.read(spark), [(T0_MS + 30 * MINUTE_MS) * 1_000])
    read, ids = rows_read(sent)
    assert (read, sorted(ids)) == (3, ["b1", "b2"])


def test_many_files_are_found_without_a_job_for_it(spark, tmp_path):
    for number in range(40):  # an hour's, landed every minute
        landed(tmp_path, f"q-{number:02}", [send(f"m{number}", number)])
    tracker = spark.sparkContext.statusTracker()
    spark.sparkContext.setJobGroup("many", "")
    try:
        assert ParquetSpans(tmp_path).read(spark).select("message_id").toArrow().num_rows == 40
        tasks = [
            tracker.getStageInfo(stage).numTasks
            for job in tracker.getJobIdsForGroup("many")
            for stage in tracker.getJobInfo(job).stageIds
        ]
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    assert sum(tasks) < 40, tasks


def test_what_was_delayed_is_found_in_the_hour_before_it_was_due(spark, tmp_path):
    due = {"due_ms": T0_MS + 59 * MINUTE_MS}
    landed(tmp_path, "q-0", [send("delayed", 0, **due), send("other", 0)])
    sent = measures.sends(ParquetSpans(tmp_path).read(spark), [due["due_ms"] * 1_000])
    assert rows_read(sent) == (2, ["delayed"])


def independent_examples(spans):
    """By kind: message id, group and µs, the largest first; of each message one a kind."""
    horizon = measures.HORIZON_S * 1_000_000
    found = defaultdict(dict)
    for row in spans:
        if row["operation"] != "send":
            continue
        name, sent = row["message_id"], row["start_ns"] // 1_000
        due = row["due_ms"] * 1_000 if row["due_ms"] else None
        expected = max(sent, due or 0)
        if expected - sent > horizon:
            continue
        calls = defaultdict(list)
        for each in spans:
            if each["operation"] == "process" and each["message_id"] == name:
                start = each["start_ns"] // 1_000
                if start <= expected + horizon:
                    calls[each["consumer_group"]].append((start, each["status"] != "ERROR"))
        for group, each in calls.items():
            first, done = min(start for start, _ in each), sum(did for _, did in each)
            kinds = {"slowest": first - sent} if due is None else {"latest": first - due}
            for kind, us in (kinds | ({"twice": first - sent} if done > 1 else {})).items():
                found[kind][name] = max(found[kind].get(name, (-1, "")), (us, group))
        if not calls and row["status"] != "ERROR":
            found["suspect"][name] = (None, None)
    return found


@pytest.mark.long
def test_examples_are_those_that_plain_python_finds(spark, spans, monkeypatch, tmp_path):
    monkeypatch.setattr(measures, "EXAMPLES_MAX", len(spans))
    monkeypatch.setattr(measures, "EXAMPLES_SHOWN", len(spans))
    landed(tmp_path, "q-0", spans)
    aggregates = Aggregates(tmp_path, ParquetSpans(tmp_path))
    run = aggregates.update(spark)
    picked = measures.picked(aggregates.examples(spark), run.newest_us).toArrow().to_pylist()
    expected = independent_examples(spans)
    assert set(expected) == set(measures.KINDS)
    for kind, wanted in expected.items():
        rows = [row for row in picked if row["kind"] == kind]
        found = {row["message_id"]: (row["us"], row["consumer_group"]) for row in rows}
        assert found == wanted, kind
        assert len(found) == len(rows)
        assert kind != "twice" or all(row["done"] > 1 for row in rows)
        if kind in ("slowest", "latest"):
            values = [row["us"] for row in rows]
            assert values == sorted(values, reverse=True)
        else:
            times = [row["sent_ts"] for row in rows]
            assert times == sorted(times, reverse=True)


def test_of_many_examples_those_that_took_longest_are_kept(spark, spans, monkeypatch):
    rng = random.Random(20_261_128)
    members = [
        row
        for number in range(30)
        for row in (
            send(f"h{number}", number),
            *(heard(f"h{number}", 30 + rng.randrange(9_000), name) for name in "xyz"),
        )
    ]
    messages = measures.messages(frame(spark, *spans, *members)).cache()

    def of(count):
        monkeypatch.setattr(measures, "EXAMPLES_MAX", count)
        return measures.examples(messages).toArrow().to_pylist()

    kinds = defaultdict(list)
    for row in of(len(spans)):
        kinds[row["bucket_ts"], row["kind"]].append(row)
    for rows in kinds.values():
        rows.sort(key=lambda row: (-(row["us"] or 0), row["topic"], row["message_id"]))
    kept = of(3)
    assert sum(len(rows) > 3 for rows in kinds.values()) > 20
    assert len(kept) == sum(min(3, len(rows)) for rows in kinds.values())
    assert all(row in kinds[row["bucket_ts"], row["kind"]][:3] for row in kept)


def test_members_that_get_everything_do_nothing_twice_unless_one_of_them_does(spark):
    rows = [send("m", 0), *(heard("m", at, name) for at, name in ((5, "one"), (7, "two")))]
    rows += [send("n", 9), *(heard("n", at, name) for at, name in ((10, "one"), (11, "one")))]
    messages = measures.messages(frame(spark, *rows)).cache()
    (delivered,) = measures.deliveries(messages).toArrow().to_pylist()
    assert (delivered["messages"], delivered["unreceived"], delivered["twice"]) == (2, 0, 1)
    (way,) = measures.end_to_end(messages).toArrow().to_pylist()
    assert (way["spans"], way["messages"], way["repeated"], way["max_us"]) == (4, 3, 1, 7_000)


def test_what_was_rescheduled_is_late_by_the_time_that_it_was_due_in_the_end(spark):
    due = T0_MS + 100
    rows = [send("m", 0, due_ms=due), process("m", MINUTE_MS + 103, due_ms=due + MINUTE_MS)]
    (row,) = measures.examples(measures.messages(frame(spark, *rows))).toArrow().to_pylist()
    assert (row["kind"], row["us"]) == ("latest", 3_000)


@pytest.mark.long
def test_an_example_changes_with_what_comes_later(spark, tmp_path):
    landed(tmp_path, "q-0", [send("gone", 0), send("quick", 1), process("quick", 2, "a")])
    aggregates = Aggregates(tmp_path, ParquetSpans(tmp_path))
    aggregates.update(spark)
    landed(tmp_path, "q-1", [process("gone", 50, "b"), send("lost", 9)])
    aggregates.update(spark)
    rows = aggregates.examples(spark).orderBy("kind", "us").toArrow().to_pylist()
    assert [(r["kind"], r["message_id"], r["consumer_group"], r["us"]) for r in rows] == [
        ("slowest", "quick", "a", 1_000),
        ("slowest", "gone", "b", 50_000),
        ("suspect", "lost", None, None),
    ]
    assert rows[2]["sent_ts"] == datetime.fromtimestamp((T0_MS + 9) / 1_000, UTC)


HOUR_MS = 60 * MINUTE_MS


@pytest.mark.parametrize(
    ("late_ms", "minutes"),
    [(HOUR_MS, [T0_MS * 1_000]), (HOUR_MS + 1, [])],
)
def test_a_call_after_the_horizon_changes_no_minute(spark, late_ms, minutes):
    sent = frame(spark, send("m", 0))
    assert affected(frame(spark, process("m", late_ms)), sent) == minutes


@pytest.mark.long
def test_a_call_hours_late_takes_nothing_from_the_minute_of_its_message(spark, tmp_path):
    # The minute's spans are in two files, of which only one reaches to what is near the call.
    landed(tmp_path, "q-0", [send("a", 0), send("b", 1)])
    landed(tmp_path, "q-1", [send("c", 2), send("later", 100 * MINUTE_MS)])
    aggregates = Aggregates(tmp_path, ParquetSpans(tmp_path))
    aggregates.update(spark)
    landed(tmp_path, "q-2", [process("c", 3 * HOUR_MS)])
    aggregates.update(spark)
    first = T0_MS // MINUTE_MS, "orders", "send", None, "delivery"
    assert told(spark, aggregates)[first]["messages"] == 3
