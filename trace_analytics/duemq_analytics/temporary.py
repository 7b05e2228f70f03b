"""Folders for what a job needs only while it runs.

A process that is killed cannot remove its own, in which Spark may have put gigabytes.  The next one
does: whoever lives holds a lock on a file in its folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "duemq-spark-"

_LOCK = ".lock"


@contextmanager
def folder(parent: Path | None = None) -> Iterator[Path]:
    """A new one, which is gone in the end; in `parent`, or where temporary files are (TMPDIR)."""
    parent = parent or Path(tempfile.gettempdir())
    _drop_left(parent)
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        with (made / "new").open("w") as file:
            with suppress(OSError):  # without locks (some network file systems) it stays unnamed
                fcntl.flock(file, fcntl.LOCK_EX)
                (made / "new").rename(made / _LOCK)  # named once it is held: nobody finds it free
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _drop_left(parent: Path) -> None:
    """Those of this user that nobody holds; without the file one just begins, or is not ours."""
    for left in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if left.lstat().st_uid != os.geteuid():
                continue
            with (left / _LOCK).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
