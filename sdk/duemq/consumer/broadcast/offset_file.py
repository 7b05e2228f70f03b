"""A broadcast member's offsets, in a file of its own.

    <directory>/<group>/<member>.json       replaced as a whole: written beside it, synced, renamed
    <directory>/<group>/<member>.lock       held while a process is this member

So after a crash the file is the one before or the one after, never a part.  A file that is damaged,
or another member's, is an error and stays as it is.  All of this blocks: call it in a thread.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from duemq.errors import Corrupt, InvalidArgument
from duemq.protocol import checks
from duemq.protocol.balance import MessageQueue
from duemq.protocol.limits import OFFSET_MAX, QUEUE_ID_MAX, TOPIC_ID_MAX

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

DEFAULT_DIRECTORY = "~/.duemq/offsets"
FORMAT = "duemq-broadcast-offsets"
VERSION = 1
# What file systems take; the ending is ours.
NAME_BYTES_MAX = 240


class Kept(NamedTuple):
    """What a member knows from before."""

    topics: frozenset[str]
    """That it has subscribed to."""
    offsets: dict[MessageQueue, int]
    """Where it goes on."""
    topic_ids: dict[MessageQueue, int]
    """Of which topic of its name an offset is, as far as that was known."""


class OffsetFile:
    """One member's file, and the lock that makes it this process's.

    Between `open` and `close`.
    """

    def __init__(self, directory: str, group: str, member: str) -> None:
        """`directory` empty: DEFAULT_DIRECTORY.  Raises InvalidArgument for illegal names."""
        self.group = group
        self.member = member
        folder = Path(directory or DEFAULT_DIRECTORY).expanduser() / _file_name("group", group)
        self.path = folder / f"{_file_name('member_name', member)}.json"
        self._lock = -1

    def open(self) -> Kept | None:
        """Makes it this process's; answers what it holds, None if there is none yet.

        Raises InvalidArgument if another process is this member, or the file is another's; Corrupt
        if it is damaged; OSError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            text = self.path.read_text("utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise self._damaged(str(error)) from error
        try:
            return self._kept(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from error

    def save(
        self,
        topics: Iterable[str],
        offsets: Mapping[MessageQueue, int],
        topic_ids: Mapping[MessageQueue, int],
    ) -> None:
        """Replaces the file; returns when the new one is on disk.  Raises OSError."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "group": self.group,
            "member": self.member,
            "topics": sorted(topics),
            "queues": [[*queue, offset] for queue, offset in sorted(offsets.items())],
            # Beside the offsets: older versions read those, and nothing of this.
            "topic_ids": [[*queue, known] for queue, known in sorted(topic_ids.items())],
        }
        beside = self.path.with_suffix(".tmp")
        with beside.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
        if sys.platform != "win32":
            _sync_directory(self.path.parent)

    def close(self) -> None:
        """Lets another process be this member.  Idempotent."""
        if self._lock >= 0:
            if sys.platform != "win32":  # a forked child has it, too, and keeps it open
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1

    def _kept(self, content: Any) -> Kept:
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"it is not of format {FORMAT}, version {VERSION}")
        owner = (content["group"], content["member"])
        if owner != (self.group, self.member):
            raise InvalidArgument(
                f"offset file {self.path} is of member {owner[1]!r} of group {owner[0]!r}",
                field="offsets_dir",
                value=self.path,
                limit=f"member {self.member!r} of group {self.group!r}",
            )
        offsets = _numbers(content["queues"], OFFSET_MAX)
        topic_ids = _numbers(content.get("topic_ids", []), TOPIC_ID_MAX)
        if not all(isinstance(topic, str) for topic in content["topics"]):
            raise ValueError("topics are names")
        return Kept(frozenset(content["topics"]), offsets, topic_ids)

    def _damaged(self, why: str) -> Corrupt:
        return Corrupt(
            f"offset file {self.path} is damaged: {why}; put a copy back, or remove it and begin "
            f"anew as `start_from` says",
            field="offsets_dir",
            value=self.path,
        )

    def _take_lock(self) -> None:
        path = self.path.with_suffix(".lock")
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            if sys.platform == "win32":
                msvcrt.locking(self._lock, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise InvalidArgument(
                f"another consumer on this host is member {self.member!r} of group "
                f"{self.group!r} (it holds {path}): give each a member_name of its own",
                field="member_name",
                value=self.member,
            ) from error


def _file_name(field: str, name: str) -> str:
    """The name with what file systems do not take as %xx."""
    safe = quote(name, safe="-_. ")
    if not safe.strip(". ") or len(safe.encode()) > NAME_BYTES_MAX:
        raise checks.wrong(
            field, name, f"the name of a file: {NAME_BYTES_MAX} bytes with escapes, not only dots"
        )
    return safe


def _numbers(rows: Any, most: int) -> dict[MessageQueue, int]:
    """A number of each queue, 0 to `most`.  Raises ValueError, TypeError."""
    numbers: dict[MessageQueue, int] = {}
    for topic, broker, queue_id, number in rows:
        if not (isinstance(topic, str) and isinstance(broker, str)):
            raise ValueError("a queue has a topic and a broker")
        if not (_is_number(queue_id, QUEUE_ID_MAX) and _is_number(number, most)):
            raise ValueError(f"queue {topic} {broker}/{queue_id} at {number}")
        numbers[MessageQueue(topic, broker, queue_id)] = number
    return numbers


def _is_number(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _sync_directory(directory: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
