"""The Spark session: that of `spark-submit`, or a local one for a small machine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from duemq_analytics import java_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource

JAVA_VERSION_MIN = 17
JAVA_ANSWER_S_MAX = 30
JAVA_END_S_MAX = 5

# One a core of a small machine.  Spark's 200 only cost task starts here, and a streaming query
# would keep the number in its checkpoint for ever.
SHUFFLE_PARTITIONS = 2

SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Spark's default for timestamps, INT96, has no statistics: readers could skip nothing.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.ui.showConsoleProgress": "false",
    # A group more than this and Spark sorts all rows instead of keeping a sketch a group (5 KB).
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "20000",
    # So many values of an `isin` are each held against Parquet's statistics; of more only the first
    # and the last, between which all may lie.
    "spark.sql.parquet.pushdown.inFilterThreshold": "100",
    "spark.log.level": "OFF",  # A failing task logs four Java traces even at ERROR.
    # Else each operation on a column asks Java several times more, for errors to say which line of
    # ours it came from.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
"""Of every session, unless it was started with others."""

LOCAL_SETTINGS = {
    "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",  # Enough for 5M spans.
    # More files than this are looked for by a job, a task a file: a lake has one a minute.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
}
"""Where nobody has said which master."""

# The serial collector: a gigabyte needs no threads of its own.
_JAVA_OPTIONS = "-XX:+UseSerialGC"

# Compiles once and quickly instead of twice and well: a short job has done its work before the
# optimizing compiler pays back.  Measured on 24,000 spans: 20 s of CPU instead of 40 s.
_QUICK_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1"

_LOGGING = Path(__file__).with_name("log4j2.properties")


class JavaMissing(Exception):
    """There is no Java that Spark can run on; the message says what to do."""


def require_java() -> int:
    """The version of the Java that Spark will start; raises JavaMissing without one new enough."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"JAVA_HOME={home}" if home else "the PATH"
        raise JavaMissing(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer and there is none in {where}: "
            f"install it (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME"
        )
    answer = subprocess.run(
        [java, "-version"],
        capture_output=True,
        text=True,
        timeout=JAVA_ANSWER_S_MAX,
        check=False,
    )
    version = java_version(answer.stderr + answer.stdout)
    if version is None or version < JAVA_VERSION_MIN:
        raise JavaMissing(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer, {java} is "
            f"{version or 'of an unknown version'}: install a newer one or set JAVA_HOME"
        )
    return version


def java_version(text: str) -> int | None:
    """The major version in what `java -version` prints; 8 for `1.8.0`, None if none is there."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if found is None:
        return None
    major = int(found[1])
    return int(found[2] or 0) if major == 1 else major


def start(
    name: str,
    scratch: Path,
    *,
    cores: int = 2,
    quick: bool = False,
    sources: bool = True,
    java_options: Sequence[str] | None = None,
) -> SparkSession:
    """A session of the master that was given, else on this machine.

    A master is given by `spark-submit` or in PYSPARK_SUBMIT_ARGS; then its other settings hold too.
    Else `scratch` takes Spark's temporary files and its (unused) warehouse, `cores` tasks run at a
    time, and `quick` is for up to some million rows.  `sources`: it knows both data sources, for
    which Spark starts Python processes at once.  `java_options`: in place of what an archive of
    classes needs.
    Raises JavaMissing, or ModuleNotFoundError where pyspark or pyarrow is not installed.
    """
    from pyspark.sql import SparkSession

    formats = _formats() if sources else []
    settings = {"spark.app.name": name, **SETTINGS}
    if submitted():
        settings = {key: settings[key] for key in settings.keys() - _submitted_settings()}
    else:
        archive = java_archive.place(require_java())
        more = java_archive.using(archive) if java_options is None else java_options
        # Workers must be this Python, not the PATH's: its packages are needed there.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if not master_in_arguments():
            # Otherwise Spark looks the host's name up, which may point nowhere.
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            settings |= LOCAL_SETTINGS | {
                "spark.master": f"local[{cores}]",
                "spark.driver.extraJavaOptions": _java_options(quick, more),
                "spark.sql.warehouse.dir": str(scratch / "warehouse"),
                "spark.local.dir": str(scratch),
            }
    try:
        spark = SparkSession.builder.config(map=settings).getOrCreate()
    except BaseException as error:
        _end_half_started(error)
        raise
    for each in formats:
        spark.dataSource.register(each)
    return spark


def _formats() -> list[type[DataSource]]:
    from duemq_analytics.sink.topic_format import TopicFormat
    from duemq_analytics.source.duemq_source import SpanSource

    return [TopicFormat, SpanSource]


def stop(spark: SparkSession) -> None:
    """Ends a session, whose Java may have ended before."""
    from py4j.protocol import Py4JError

    with suppress(Py4JError, ConnectionError):
        spark.stop()


def _end_half_started(error: BaseException) -> None:
    """Java that was not up when its start was broken off: it would stay for ever.

    pyspark takes away the folder where it is to write, and then it does not look at its standard
    input any more.  Only the frames that were left know the process.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for process in frame.f_locals.values():
            # Without a number it was never there, and asking for it would hide the error.
            if isinstance(process, subprocess.Popen) and getattr(process, "pid", None):
                process.kill()
                process.wait()


def java_ended(spark: SparkSession, error: Exception) -> str:
    """What became of the Java that this process has started, if `error` is of its end; else ""."""
    from py4j.protocol import Py4JNetworkError

    process = getattr(spark.sparkContext._gateway, "proc", None)
    if process is None or not isinstance(error, Py4JNetworkError | ConnectionRefusedError):
        return ""
    try:
        code = process.wait(JAVA_END_S_MAX)  # its connections end first
    except subprocess.TimeoutExpired:
        return ""
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"Java, in which Spark runs, {how}: is there too little memory?"


def submitted() -> bool:
    """Whether `spark-submit` started this process: its Java runs already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _submitted_settings() -> set[str]:
    """The names of what `spark-submit` was given, on its command line and in its files."""
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # connects to that Java; SparkConf then reads its settings
    return {name for name, _ in SparkConf().getAll()}


def master_in_arguments() -> bool:
    """Whether PYSPARK_SUBMIT_ARGS names one: Spark is started as it says, and not as `start`."""
    words = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    return any(word == "--master" or word.startswith("--master=") for word in words)


def _java_options(quick: bool, more: Sequence[str]) -> str:
    options = [_JAVA_OPTIONS, f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}", *more]
    return " ".join(f'"{each}"' for each in ([*options, _QUICK_JAVA_OPTIONS] if quick else options))
