"""A lake landed and counted by executors: processes beside the driver, with heaps of their own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from duemq.protocol.names import TRACE_TOPIC
from tests.service.blocking_cluster import FakeCluster, FakeQueue, serving
from tests.spark.lake_spans import record

pytestmark = pytest.mark.spark

MASTER = "local-cluster[2,1,1024]"
RUN_S_MAX = 550
QUICK = "-XX:TieredStopAtLevel=1"  # as a session of ours has for little data

# Both in one Java, which takes longest to start.
JOB = """
import sys
from duemq_analytics.__main__ import main

address, lake, page = sys.argv[1:]
land = ["land", "--once", "--json", "--nameserver", address, "--output", lake]
sys.exit(main(land) or main(["report", "--json", "--lake", lake, "--output", page]))
"""


@pytest.fixture
def work():
    """Where Spark's workers keep what their executors print: in its own folder, always."""
    folder = Path(pyspark.__file__).parent / "work"
    before = set(folder.glob("*"))
    yield
    for left in set(folder.glob("*")) - before:
        shutil.rmtree(left)


@pytest.mark.long
@pytest.mark.usefixtures("work")
@pytest.mark.timeout(600)
def test_executors_land_and_count(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    command = [str(Path(sys.executable).with_name("spark-submit")), "--master", MASTER]
    command += ["--conf", "spark.ui.enabled=false", "--conf", f"spark.local.dir={tmp_path}"]
    command += ["--conf", "spark.sql.shuffle.partitions=2"]
    command += ["--driver-java-options", QUICK]
    command += ["--conf", f"spark.executor.extraJavaOptions={QUICK}"]
    home = tmp_path / "spark"  # Spark's scripts stand no space in the path of its own
    home.symlink_to(Path(pyspark.__file__).parent)
    variables = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    variables["SPARK_HOME"] = str(home)
    with serving(FakeCluster()) as cluster:
        cluster.topics[TRACE_TOPIC] = [
            FakeQueue([record(i) for i in range(q, 40, 4)]) for q in range(4)
        ]
        paths = [str(tmp_path / "lake"), str(tmp_path / "page")]
        done = subprocess.run(
            [*command, str(job), cluster.address, *paths],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, **variables},
            timeout=RUN_S_MAX,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, landed, report = map(json.loads, done.stdout.splitlines())
    assert (landed["event"], landed["spans"]) == ("landed", 400)
    assert (report["event"], report["spans"], report["master"]) == ("report", 400, MASTER)
    assert Path(report["html"]).exists()
