"""The report as a job of spark-submit: its master and settings hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyarrow import Table, parquet

import duemq_analytics
from duemq_analytics.source import schema
from tests.spark.test_jobs import process, send

pytestmark = pytest.mark.spark


@pytest.mark.long
def test_spark_submit_says_where_it_runs(tmp_path):
    (tmp_path / "spans").mkdir()
    spans = [send("m", 0), process("m", 3)]
    # As an older version has written them: without the columns that came last.
    columns = schema.SPANS[: [column.name for column in schema.SPANS].index("trace_row") + 1]
    table = Table.from_pylist(spans, schema=schema.arrow_schema(columns))
    parquet.write_table(table, tmp_path / "spans" / "old.parquet")
    submit = Path(sys.executable).with_name("spark-submit")
    command = [str(submit), "--master", "local[3]", "--driver-memory", "600m"]
    command += ["--conf", "spark.ui.enabled=false", "--conf", f"spark.local.dir={tmp_path}"]
    command += [str(Path(duemq_analytics.__file__).with_name("__main__.py")), "report", "--json"]
    command += ["--spans", f"file:{tmp_path}/spans", "--output", f"file:{tmp_path}/out"]
    home = tmp_path / "spark"  # Spark's scripts stand no space in the path of its own
    home.symlink_to(Path(pyspark.__file__).parent)
    variables = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    variables["SPARK_HOME"] = str(home)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # and nothing else, though both streams are one here
    assert (result["master"], result["spans"], result["topics"]) == ("local[3]", 2, ["orders"])
    assert result["html"] == f"file:{tmp_path}/out/report.html"
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {"report.html", "operations", "end_to_end", "lateness"}
