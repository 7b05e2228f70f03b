"""An archive of Java's classes: made by a command, used by what starts Spark afterwards."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from duemq.errors import Rejected
from duemq_analytics import java_archive, prepare_command, session
from duemq_analytics.lake.parquet_spans import ParquetSpans

# With a job in place of reports, which take a cold Java 40 s.
PREPARE = """
import sys
from duemq_analytics import __main__, prepare_command
prepare_command._report = lambda spark, scratch: spark.range(2).count() - 2
sys.exit(__main__.main())
"""
LOADED = """
import sys
from pathlib import Path
from pyspark import SparkContext
from duemq_analytics import session
spark = session.start("test", Path(sys.argv[1]))
java = Path("/proc", str(SparkContext._gateway.proc.pid))
print((java / "exe").readlink(), (java / "maps").read_text(), sep="\\n")
spark.stop()
"""


def run(*arguments: str, cache: Path) -> str:
    """What a Python of its own prints."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)  # Java writes for a while
def test_what_was_prepared_is_used_by_the_next_spark(tmp_path: Path) -> None:
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    told = json.loads(run("-c", PREPARE, "prepare", "--json", cache=cache))
    archive = Path(told["archive"])
    place = java_archive.place(session.require_java(), {"XDG_CACHE_HOME": str(cache)})
    assert archive == place
    assert archive.stat().st_size == told["bytes"] > 50_000_000
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]
    java, maps = run("-c", LOADED, str(scratch), cache=cache).split("\n", 1)
    assert str(archive) in maps
    archive.chmod(0o600)
    archive.write_bytes(b"no archive")
    command = [java, *java_archive.using(archive), "-version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")  # it starts all the same


@pytest.mark.long
def test_all_that_a_report_needs_runs_while_java_takes_notes(
    spark: SparkSession, tmp_path: Path
) -> None:
    assert prepare_command._report(spark, tmp_path) == 0
    assert [each.spans for each in ParquetSpans(tmp_path / "lake").batches()] == [5_120, 5_120]
    assert "2,560" in (tmp_path / "report" / "report.html").read_text()  # messages


def test_an_archive_is_of_one_spark_and_one_java() -> None:
    def named(major: int, **environment: str) -> str:
        return str(java_archive.place(major, environment))

    assert named(17, HOME="/home/u").startswith("/home/u/.cache/duemq/spark-")
    assert named(17, HOME="/home/u", XDG_CACHE_HOME="/c") == named(17, XDG_CACHE_HOME="/c")
    assert named(17, HOME="/home/u") != named(21, HOME="/home/u")
    assert java_archive.place(17, {}) is None


def test_without_an_archive_java_is_told_nothing(tmp_path: Path) -> None:
    assert java_archive.using(None) == java_archive.using(tmp_path / "none.jsa") == []


def test_an_archive_that_cannot_be_looked_for_is_none(tmp_path: Path) -> None:
    """HOME may be that of another user; too long a name fails for root, too."""
    assert java_archive.using(tmp_path / ("x" * 300)) == []


def test_a_spark_that_no_distribution_brought_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert java_archive.place(17, {"HOME": "/home/u"}) is not None


JAVA = """
import signal
import sys
from pathlib import Path
sys.stdin.read()
made = Path(sys.argv[1])
if made.parent.is_dir():
    made.write_bytes(b"part")
if sys.argv[2] == "never":
    signal.pause()
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("report", "code", "raised", "ended"),
    [
        (KeyboardInterrupt(), "0", KeyboardInterrupt, -signal.SIGKILL),
        (0, "1", Rejected, 1),
        (0, "never", Rejected, -signal.SIGKILL),
    ],
)
def test_of_a_prepare_that_fails_nothing_stays(
    report: Any,
    code: str,
    raised: type,
    ended: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Java writes when it ends: after an interruption, too, and perhaps a part only."""
    started: list[subprocess.Popen[bytes]] = []

    def with_spark(*_: object, java_options: list[str], **__: object) -> int:
        made = java_options[0].partition("=")[2]
        command = [sys.executable, "-c", JAVA, made, code]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        gateway = SimpleNamespace(proc=started[0], shutdown=lambda: None)
        monkeypatch.setattr(SparkContext, "_gateway", gateway)
        if isinstance(report, BaseException):
            raise report
        return int(report)

    monkeypatch.setattr(prepare_command, "with_spark", with_spark)
    if code == "never":
        monkeypatch.setattr(prepare_command, "JAVA_ENDS_S_MAX", 0.1)
    monkeypatch.setattr(session, "submitted", lambda: False)
    monkeypatch.setattr(session, "require_java", lambda: 17)
    archive = tmp_path / "cache" / "an.jsa"
    monkeypatch.setattr(java_archive, "place", lambda *_: archive)
    with pytest.raises(raised):
        prepare_command.prepare(argparse.Namespace(json=True), tmp_path)
    [java] = started
    assert java.stdin is not None
    found = java.returncode
    java.stdin.close()
    java.kill()
    assert found == ended
    assert list(archive.parent.iterdir()) == []


def test_who_has_no_home_is_told_where_an_archive_could_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "require_java", lambda: 17)
    monkeypatch.setattr(java_archive, "place", lambda _: None)
    with pytest.raises(Rejected, match="HOME or XDG_CACHE_HOME"):
        prepare_command.prepare(argparse.Namespace(json=True), tmp_path)


def test_prepare_runs_on_nobody_elses_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be started without the options, and a cluster would run the report."""
    monkeypatch.setattr(prepare_command, "with_spark", lambda *_, **__: pytest.fail("it ran"))
    monkeypatch.setattr(session, "require_java", lambda: 17)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master spark://m:7077 pyspark-shell")
    with pytest.raises(Rejected, match="PYSPARK_SUBMIT_ARGS"):
        prepare_command.prepare(argparse.Namespace(json=True), tmp_path)
