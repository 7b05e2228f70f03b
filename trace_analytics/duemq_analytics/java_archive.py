"""Java's archive of classes (class-data sharing): Spark starts sooner where there is one.

One a version of Spark and Java, made by `prepare`.  Java itself passes over one that does not fit
its jars.  https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_QUIET = ("-Xlog:disable", "-Xlog:all=error:stderr")
"""Java would say on stdout which classes an archive lacks."""


def place(java_major: int, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the archive lies or would lie: in the user's cache folder; None: there is no home."""
    cache, home = environment.get("XDG_CACHE_HOME"), environment.get("HOME")
    if not cache and not home:
        return None
    from pyspark import __version__  # where it is of a SPARK_HOME, no distribution says it

    folder = Path(cache) if cache else Path(str(home)) / ".cache"
    return folder / "duemq" / f"spark-{__version__}-java-{java_major}.jsa"


def using(archive: Path | None) -> list[str]:
    """Java's options, with one that is there, as far as this user may see."""
    if archive is None or not os.path.isfile(archive):  # Path's raises
        return []
    return [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", *_QUIET]


def making(archive: Path) -> list[str]:
    """Java's options, to write one when it ends."""
    return [f"-XX:ArchiveClassesAtExit={archive}", *_QUIET]
