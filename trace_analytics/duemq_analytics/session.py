"""A local Spark session with the settings that suit these jobs on a small machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_VERSION_MIN = 17
JAVA_ANSWER_S_MAX = 30

# One a core of a small machine.  Spark's 200 only cost task starts here, and a streaming query
# would keep the number in its checkpoint for ever.
SHUFFLE_PARTITIONS = 2

SETTINGS = {
    "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",  # A failing task logs four Java traces even at ERROR.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",  # Enough for 5M spans.
}

# The serial collector: a gigabyte needs no threads of its own.
_JAVA_OPTIONS = "-XX:+UseSerialGC"

# Compiles once and quickly instead of twice and well: a short job has done its work before the
# optimizing compiler pays back.  Measured on 24,000 spans: 20 s of CPU instead of 40 s.
_QUICK_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1"

_LOGGING = Path(__file__).with_name("log4j2.properties")


class JavaMissing(Exception):
    """There is no Java that Spark can run on; the message says what to do."""


def require_java() -> str:
    """The java that Spark will start; raises JavaMissing if there is none or it is too old."""
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
    return java


def java_version(text: str) -> int | None:
    """The major version in what `java -version` prints; 8 for `1.8.0`, None if none is there."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if found is None:
        return None
    major = int(found[1])
    return int(found[2] or 0) if major == 1 else major


def start(name: str, scratch: Path, *, cores: int = 2, quick: bool = False) -> SparkSession:
    """A session on this machine that knows both data sources.

    `scratch` takes Spark's temporary files and its (unused) warehouse.  `quick`: for up to some
    million rows.
    Raises JavaMissing, or ModuleNotFoundError where pyspark or pyarrow is not installed.
    """
    require_java()
    from pyspark.sql import SparkSession

    from duemq_analytics.source.duemq_source import MessageSource, SpanSource

    # Otherwise Spark looks the host's name up, which may point nowhere.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Workers must be this Python, not the PATH's: its packages are needed there.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{cores}]").appName(name)
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    builder = builder.config("spark.driver.extraJavaOptions", _java_options(quick))
    builder = builder.config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
    builder = builder.config("spark.local.dir", str(scratch))
    spark = builder.getOrCreate()
    spark.dataSource.register(MessageSource)
    spark.dataSource.register(SpanSource)
    return spark


def _java_options(quick: bool) -> str:
    options = [_JAVA_OPTIONS, f'"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"']
    return " ".join([*options, _QUICK_JAVA_OPTIONS] if quick else options)
