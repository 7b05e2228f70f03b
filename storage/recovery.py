"""What the end of a log means after a crash.

Entries are verified one after the other.  Where the first invalid one starts,
at p, the rest of the last segment is searched for valid entries.  What is known
to have been durable is the log's durable mark or the owner's checkpoint, the
later of the two:

| valid entries after p                          | meaning              | what is done           |
|------------------------------------------------|----------------------|------------------------|
| none                                           | torn tail            | cut at p, kept aside   |
| some, p known to have been durable             | damage               | refuse to start        |
| some, one of them written when p was durable   | damage               | refuse to start        |
| some, all written before p was durable         | hole of a torn group | cut at p, kept aside   |
| p in a segment that is not the last            | damage               | refuse to start        |

The last row holds because a segment is synced before its successor is made.  A
group's entries carry the position that was durable when the group was written,
so the third row does not depend on the mark, which a power failure may set back.

A log that is catching up with its leader's (replicas/catching_up.py) is cut at p in every case: its
entries may say of themselves what is true on other disks only, nobody counts on it, and what goes
is fetched anew.

Where the disk has no space for what is kept aside, zeros at the segment's end make room for it.  If
that is not enough, a torn tail that begins behind all that is known to have been durable is cut
without a copy, which the log says as an error; in every other case the start is refused until
there is space.

What is left behind all that is known to have been durable is written once more before the sync that
makes it so: after a sync that failed, pages can be read that are not on the disk, and the kernel
takes them for clean.

A cut before what was durable means that acknowledged data are gone (a truncated
file, a disk that lied about a sync).  The log starts without them, since they
are the end of it and nothing valid is skipped, but says so as an error.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from duemq_server.storage import record
from duemq_server.storage.disk import (
    Disk,
    DiskFile,
    ReadableFile,
    write_all,
    write_whole,
)
from duemq_server.storage.record import Entry, EntryCutOffError, InvalidEntryError
from duemq_server.storage.segment import Segment

CHUNK_BYTES = 4 * 1024 * 1024
"""Read size of a scan; a multiple of the entries' alignment."""
assert CHUNK_BYTES % record.ALIGNMENT == 0


def remedy(directory: str, position: int) -> str:
    """What an operator can do about damage at a position."""
    return (
        f"Run `duemq-storage check {directory}` to see all damage, then restore the file from"
        " a copy (a replica's data directory is emptied instead: it gets everything from the one"
        " that leads), or accept the loss of this entry alone with"
        f" `duemq-storage set-aside {directory} --at {position}`, or of everything from there"
        f" on with `duemq-storage cut {directory} --at {position}`"
    )


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a scan met the first bytes that are no entry, and why."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tail:
    """What lies behind a stop."""

    valid_position: int | None
    """The first valid entry after it."""
    synced_position_max: int
    """The highest synced position that the valid entries carry."""
    nonzero_end: int
    """Position after the last byte that is not zero or is a valid entry's; the stop's if there is
    none."""


class Scan:
    """Iterates over the verified entries of a segment, from an entry's start on.

    Ends at the first bytes that are no entry; `stop` then says where that is.
    With `end`, reads no further than the entry that lies there.  Raises UnknownVersion.
    """

    def __init__(
        self, file: ReadableFile, segment: Segment, position: int, end: int | None = None
    ) -> None:
        self.stop = Stop(position, "not scanned")
        self._file = file
        self._segment = segment
        self._end = end

    def __iter__(self) -> Iterator[Entry]:
        position = self.stop.position
        wanted = self._chunk_bytes(position)
        while wanted:
            chunk = self._file.pread(wanted, position - self._segment.start)
            at = length = 0
            problem = "end of file"
            try:
                while at < len(chunk):
                    entry = record.decode(chunk, at, position + at)
                    yield entry
                    at = entry.end - position
            except EntryCutOffError as error:
                problem, length = str(error), error.length
            except InvalidEntryError as error:
                self.stop = Stop(position + at, str(error))
                return
            if len(chunk) < wanted:
                self.stop = Stop(position + at, problem)
                return
            position += at
            # The next read begins with the entry that was cut off and holds all of it.
            wanted = max(self._chunk_bytes(position), length)
        self.stop = Stop(position, "not scanned any further")

    def _chunk_bytes(self, position: int) -> int:
        left = CHUNK_BYTES if self._end is None else max(0, self._end - position)
        return min(CHUNK_BYTES, left)


def search(file: ReadableFile, segment: Segment, position: int) -> Tail:
    """Looks for valid entries after `position`, which has none."""
    valid: int | None = None
    synced_max = 0
    nonzero_end = valid_end = position
    skip_to = position + record.ALIGNMENT
    chunk_start = position
    while chunk := file.pread(CHUNK_BYTES, chunk_start - segment.start):
        data = bytes(chunk)
        stripped = len(data.rstrip(b"\0"))
        if stripped:
            nonzero_end = chunk_start + stripped
        for candidate in _candidates(data, chunk_start, segment):
            entry = _entry_at(file, segment, candidate) if candidate >= skip_to else None
            if entry is not None:
                valid = candidate if valid is None else valid
                synced_max = max(synced_max, entry.synced_position)
                skip_to = valid_end = entry.end
        chunk_start += len(data)
    return Tail(valid, synced_max, max(nonzero_end, valid_end))


def first_within(file: ReadableFile, segment: Segment, position: int, end: int) -> int | None:
    """Where the first valid entry begins that begins between the two; None: none does."""
    data = bytes(file.pread(end - position, position - segment.start))
    for candidate in _candidates(data, position, segment):
        if candidate >= position and _entry_at(file, segment, candidate):
            return candidate
    return None


def _candidates(data: bytes, position: int, segment: Segment) -> Iterator[int]:
    """Where entries may begin, by their magic; `data` lies at `position`.

    Entries are aligned and the magic lies within one 8-byte word: aligned chunks split none.
    """
    at = -1
    while (at := data.find(record.MAGIC_BYTES, at + 1)) >= 0:
        candidate = position + at - record.MAGIC_OFFSET
        if not (candidate - segment.start) % record.ALIGNMENT:
            yield candidate


def _entry_at(file: ReadableFile, segment: Segment, position: int) -> Entry | None:
    offset = position - segment.start
    header = file.pread(record.HEADER_BYTES, offset)
    if len(header) < record.HEADER_BYTES:
        return None
    # The position first: it rejects nearly every chance find without a CRC.
    if record.HEADER.unpack_from(header)[6] != position:
        return None
    length = record.plausible_length(header)
    try:
        return record.decode(file.pread(length, offset), 0, position) if length else None
    except InvalidEntryError:
        return None


def is_damage(stop: Stop, tail: Tail, durable_position: int) -> bool:
    """Whether the bytes at the stop were durable once and valid data follow."""
    return tail.valid_position is not None and (
        stop.position < durable_position or tail.synced_position_max > stop.position
    )


def set_segments_aside(segments: Sequence[Segment], disk: Disk) -> list[str]:
    """Renames whole segments to `<segment>.broken-<start>`, durably; answers the new paths.

    Last first: whenever this is interrupted, the segments left have no gap.
    """
    aside = []
    for segment in reversed(segments):
        names = _names_aside(segment, segment.start)
        path = next(name for name in names if not disk.exists(name))
        disk.rename(segment.path, path)
        disk.fsync_dir(os.path.dirname(path))
        aside.append(path)
    return aside


def keep_aside(
    file: ReadableFile, segment: Segment, stop: Stop, tail: Tail, disk: Disk
) -> str | None:
    """Copies what a cut will remove to `<segment>.broken-<position>`, durably.

    Answers its path; None when there is nothing but zeros.
    """
    if tail.nonzero_end <= stop.position:
        return None
    offset, length = stop.position - segment.start, tail.nonzero_end - stop.position
    for path in _names_aside(segment, stop.position):
        if not disk.exists(path):
            write_whole(path, _pieces(file, offset, length), disk)
            break
        if _is_copy(file, offset, length, disk.open(path)):  # of a cut that was interrupted
            break
    disk.fsync_dir(os.path.dirname(path))  # before the cut takes the only other copy away
    return path


def write_again(file: DiskFile, offset: int, end: int) -> None:
    """Makes what a file has there dirty, for a sync to write it.  Raises DiskFull, DiskFailed."""
    for piece in _pieces(file, offset, end - offset):
        write_all(file, [piece], offset)
        offset += len(piece)


def _names_aside(segment: Segment, position: int) -> Iterator[str]:
    """Where what is cut there may be kept: a cut never takes away what an earlier one kept."""
    name = f"{segment.path}.broken-{position}"
    yield name
    for number in itertools.count(2):
        yield f"{name}.{number}"


def _pieces(file: ReadableFile, offset: int, length: int) -> Iterator[memoryview]:
    for done in range(0, length, CHUNK_BYTES):
        yield file.pread(min(CHUNK_BYTES, length - done), offset + done)


def _is_copy(file: ReadableFile, offset: int, length: int, copy: DiskFile) -> bool:
    with closing(copy):
        pieces = zip(_pieces(copy, 0, length), _pieces(file, offset, length), strict=True)
        return copy.size() == length and all(ours == theirs for ours, theirs in pieces)
