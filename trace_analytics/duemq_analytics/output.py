"""Where a report goes: a folder at any path that Spark writes tables to.

A local folder, `file:/…`, `hdfs://…`, `s3a://…`: Hadoop's file systems resolve it, for the page as
for the tables, so that all of a report lies in one place.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Two letters at least: a single one could be meant as a drive.
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def is_uri(path: str) -> bool:
    """Whether a path names its file system."""
    return _URI.match(path) is not None


def child(folder: str, name: str) -> str:
    """The path of what lies in a folder."""
    return f"{folder.rstrip('/')}/{name}"


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Writes a file, in place of one that is there.  Raises Py4JJavaError, or locally OSError."""
    hadoop = spark._jvm.org.apache.hadoop.fs
    where = hadoop.Path(path)
    files = where.getFileSystem(spark._jsc.hadoopConfiguration())
    if files.getUri().getScheme() == "file":  # getScheme: not all file systems have it
        _write_local(Path(files.makeQualified(where).toUri().getPath()), text.encode())
        return
    stream = files.create(where, True)
    try:
        stream.write(bytearray(text.encode()))
    finally:
        stream.close()


def _write_local(path: Path, content: bytes) -> None:
    """All of it or nothing: the one before stays where a disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_name(f".{path.name}.new")
    try:
        begun.write_bytes(content)
        begun.replace(path)
    finally:
        begun.unlink(missing_ok=True)
