"""Spans are landed once: over restarts, and when the driver dies at the worst moments."""

import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial

import pytest
from pyarrow import dataset

from duemq.errors import TopicReplaced
from duemq.protocol.names import TRACE_TOPIC
from duemq.v1.message_pb2 import Record
from duemq_analytics.lake import landing
from duemq_analytics.lake.landing import Landing
from duemq_analytics.lake.parquet_spans import ParquetSpans
from tests.cluster.harness import until
from tests.service.blocking_cluster import FakeCluster, FakeQueue, serving
from tests.spark.lake_spans import record, span_ids

pytestmark = [pytest.mark.long, pytest.mark.spark]

RUN_S_MAX = 250


@pytest.fixture
def cluster():
    with serving(FakeCluster()) as served:
        yield served


def land(spark, cluster, lake, per_trigger=10_000, **how):
    batches = []
    wanted = Landing(cluster.address, TRACE_TOPIC, lake, None, per_trigger, timeout_s=60, **how)
    landing.start(spark, wanted, batches.append).awaitTermination()
    return batches


def landed(lake):
    """The ids of all spans there, as the commits name their files."""
    files = [str(lake / file.path) for file in ParquetSpans(lake).files()]
    table = dataset.dataset(files, format="parquet").to_table(["span_id"])
    return sorted(table.column("span_id").to_pylist())


def in_the_folder(lake):
    """The same as whoever reads the folder finds it."""
    table = dataset.dataset(lake / "spans", format="parquet").to_table(["span_id"])
    return sorted(table.column("span_id").to_pylist())


def test_each_run_goes_on_where_the_last_one_ended(spark, cluster, tmp_path):
    queues = cluster.topics[TRACE_TOPIC] = [
        FakeQueue([record(i) for i in range(20)]),
        FakeQueue([record(i) for i in range(20, 24)], 7),
    ]
    first, second = land(spark, cluster, tmp_path, per_trigger=14)
    # The short queue whole and ten of the long one: nobody waits for another's backlog.
    assert first.ends == {"broker-0": {"0": 10, "1": 11}}
    assert second.ends == {"broker-0": {"0": 20}}
    assert land(spark, cluster, tmp_path) == []
    queues[0].records += [record(24), Record(body=b"\xff")]
    queues.append(FakeQueue([record(25)]))
    (third,) = land(spark, cluster, tmp_path)
    assert (third.spans, third.undecodable) == (20, 1)
    assert len({first.plan, second.plan, third.plan, ""}) == 4
    assert landed(tmp_path) == in_the_folder(tmp_path) == span_ids(range(26))
    table = ParquetSpans(tmp_path)
    assert table.undecodable(None) == 1
    assert table.topic_ends() == {"0": {"broker-0": {"0": 22, "1": 11, "2": 1}}}
    assert table.read(spark).count() == 260
    assert table.read(spark, [third.key]).count() == 20


@pytest.mark.parametrize("what", ["", "metadata"], ids=["all of it", "whose query it was"])
def test_a_lost_checkpoint_repeats_nothing(spark, cluster, tmp_path, what):
    queue = FakeQueue([record(i) for i in range(3)])
    cluster.topics[TRACE_TOPIC] = [queue]
    land(spark, cluster, tmp_path)
    lost = tmp_path / "_checkpoint" / what
    lost.rename(tmp_path / "_lost")
    if what:
        lost.touch()  # as a power failure leaves what was not synced
    queue.records += [record(3)]
    (batch,) = land(spark, cluster, tmp_path)
    assert batch.spans == 10
    assert landed(tmp_path) == in_the_folder(tmp_path) == span_ids(range(4))


def test_after_a_lost_checkpoint_the_first_batch_repeats_nothing_either(
    spark, cluster, tmp_path, monkeypatch
):
    """Spark asks anew where a query began until its first micro-batch is done."""
    queue = FakeQueue([record(i) for i in range(3)])
    cluster.topics[TRACE_TOPIC] = [queue]
    land(spark, cluster, tmp_path)
    shutil.rmtree(tmp_path / "_checkpoint")
    queue.records += [record(3)]
    with monkeypatch.context() as patch:
        patch.setattr(ParquetSpans, "land", lambda *_: 1 / 0)
        with pytest.raises(Exception, match="division by zero"):
            land(spark, cluster, tmp_path)
    assert (tmp_path / "_checkpoint/offsets/0").exists()
    (batch,) = land(spark, cluster, tmp_path)
    assert batch.spans == 10
    assert landed(tmp_path) == in_the_folder(tmp_path) == span_ids(range(4))


def test_a_lost_checkpoint_passes_nothing_over_of_a_topic_made_anew(spark, cluster, tmp_path):
    cluster.topics[TRACE_TOPIC] = [FakeQueue([record(0)])]
    cluster.topic_id = 7
    (batch,) = land(spark, cluster, tmp_path)
    assert batch.topic_ids == {"broker-0": 7}
    shutil.rmtree(tmp_path / "_checkpoint")
    cluster.topics[TRACE_TOPIC] = [FakeQueue([record(1), record(2)])]
    cluster.topic_id = 9
    with pytest.raises(TopicReplaced, match="made anew since offset 1"):
        land(spark, cluster, tmp_path)
    (batch,) = land(spark, cluster, tmp_path, fail_on_data_loss=False)
    assert (batch.topic_ids, landed(tmp_path)) == ({"broker-0": 9}, span_ids(range(3)))


def test_compaction_keeps_what_is_landed_and_drops_old_hours(spark, cluster, tmp_path):
    queue = FakeQueue([record(i) for i in range(24)])  # four hours
    cluster.topics[TRACE_TOPIC] = [queue]
    batches = land(spark, cluster, tmp_path, per_trigger=4)
    table = ParquetSpans(tmp_path)
    settled = {batch.key for batch in batches}
    done = table.compact(spark, settled - {batches[0].key}, None)
    assert (done.files_before, done.files_after, done.expired) == (6, 4, 0)
    assert landed(tmp_path) == in_the_folder(tmp_path) == span_ids(range(24))
    # The newest can come again, and the first one was not aggregated: they are as they were.
    assert [batch.key for batch in table.batches()] == [batches[0].key, batches[-1].key]
    queue.records += [record(24)]
    land(spark, cluster, tmp_path)
    newest = max(file.last_us for file in table.files()) // 1_000_000
    keep_from = datetime.fromtimestamp(newest - 2 * 3_600, UTC)
    kept = table.compact(spark, settled, keep_from)
    assert kept.expired == 3
    assert landed(tmp_path) == in_the_folder(tmp_path) == span_ids(range(12, 25))
    assert table.topic_ends() == {"0": {"broker-0": {"0": 25}}}


@pytest.mark.timeout(900)
def test_killed_at_any_moment_each_span_is_there_once(cluster, tmp_path):
    lake = tmp_path / "lake"
    cluster.topics[TRACE_TOPIC] = [
        FakeQueue([record(i) for i in range(q, 120, 3)]) for q in range(3)
    ]
    moments = [  # of a batch: its files are being written; they count; Spark knows it, too
        lambda: any(lake.glob("spans/*/*/*")),
        lambda: len(list(lake.glob("_batches/*.json"))) >= 2,
        lambda: (lake / "_checkpoint/commits/2").exists(),
    ]
    for moment in moments:
        driver = start(cluster, lake)
        try:
            until(partial(come_or_ended, moment, driver), RUN_S_MAX)
            assert driver.poll() is None, driver.communicate()
        finally:
            os.kill(driver.pid, signal.SIGKILL)
            driver.communicate()
        assert len(set(in_the_folder(lake))) == len(in_the_folder(lake))
    driver = start(cluster, lake)
    out, err = driver.communicate(timeout=RUN_S_MAX)
    assert driver.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["event"] == "landed"
    assert landed(lake) == in_the_folder(lake) == span_ids(range(120))
    assert not list(lake.glob("spans/*/*/.*"))


def come_or_ended(moment, driver):
    return moment() or driver.poll() is not None


def start(cluster, lake):
    command = [sys.executable, "-m", "duemq_analytics", "land", "--once", "--json"]
    command += ["--nameserver", cluster.address, "--output", str(lake)]
    command += ["--messages-per-batch", "12"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
