"""Small JSON files, each of which makes a step of a table true: all of it, or nothing.

A step first writes its data under names of its own, then its commit.  What no commit names is not
there.  Owned by: the job that has the folder's lock (`lock`).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from duemq.errors import Corrupt, Rejected

VERSION = 1
"""Of all commits.  A reader refuses a newer one; who adds a field that may be left out keeps it."""

SUFFIX = ".json"


class Commits:
    """The commits in one folder, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a commit durably, in place of one of this name."""
        make_folder(self._folder)
        temporary = self._folder / f".{name}.new"  # one name: what a kill leaves is written over
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump({"version": VERSION, **content}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._folder / f"{name}{SUFFIX}")
        except BaseException:
            temporary.unlink(missing_ok=True)  # the disk may be full, and a job tries again
            raise
        sync(self._folder)

    def get(self, name: str) -> dict[str, Any]:
        """Raises FileNotFoundError, or Corrupt naming the file."""
        path = self._folder / f"{name}{SUFFIX}"
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version = int(content["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"{path} is no commit: {error}", field="version") from error
        if version > VERSION:
            raise Corrupt(
                f"{path} is of version {version}: a newer duemq-analytics wrote it",
                field="version",
                value=version,
                limit=VERSION,
            )
        return content

    def names(self) -> list[str]:
        """In order."""
        found = self._folder.glob(f"*{SUFFIX}")
        return sorted(path.stem for path in found if not path.name.startswith("."))

    def remove(self, name: str) -> None:
        """Of one that others have taken the place of."""
        (self._folder / f"{name}{SUFFIX}").unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """With those above it that are missing, durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def sync_table(folder: Path) -> None:
    """Makes durable what others have written there, who do not: Spark leaves it to the system."""
    for each in (*folder.iterdir(), folder, folder.parent, folder.parent.parent):
        sync(each)


def sync(path: Path) -> None:
    """Makes a file's bytes durable, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def lock(folder: Path, what: str) -> Iterator[None]:
    """Lets one process at a time do `what`; raises Rejected if another does.  Ends with it."""
    make_folder(folder)
    path = folder / f"_{what}.lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Rejected(
                f"{folder}: another process is {what} there ({path.name} is held)",
                field="lake",
                value=str(folder),
            ) from None
        yield
