"""Ends a log at a position: an operator accepts the loss of what follows.

Nothing is destroyed that can be read: the rest of the segment and all later segments stay beside
the log as `<segment>.broken-<position>`.  The durable mark keeps saying how far the
log went: at its next start the owner learns how much is gone.
"""

from __future__ import annotations

from duemq_server.storage import recovery
from duemq_server.storage.disk import Disk
from duemq_server.storage.durable_mark import DurableMark
from duemq_server.storage.log_parts.worn_file import PAGE_BYTES, WornFile
from duemq_server.storage.segment import Segment, list_segments


def cut(directory: str, position: int, disk: Disk) -> list[str]:
    """Cuts and answers the files that were kept aside.

    Raises ValueError unless entries are valid up to exactly `position`.
    """
    segments = list_segments(directory, disk)
    kept_segments = [s for s in segments if s.start <= position]
    if not kept_segments:
        raise ValueError(f"{directory} does not hold position {position}")
    last = kept_segments[-1]
    file = disk.open(last.path)
    worn = WornFile(file)
    scan = recovery.Scan(worn, last, last.start)
    end = last.start
    for entry in scan:
        if end >= position:
            break
        end = entry.end
    if end < position:
        raise ValueError(f"entries are valid up to {end} only ({scan.stop.reason}): cut there")
    if end != position:
        raise ValueError(f"{position} is inside of an entry, which ends at {end}")

    mark = DurableMark(directory, disk)
    mark.store(max(mark.load(), _end_of(segments[-1], disk)))
    mark.sync()
    mark.close()
    disk.fsync_dir(directory)
    aside = recovery.set_segments_aside(segments[len(kept_segments) :], disk)
    stop = recovery.Stop(position, "cut on request")
    tail = recovery.search(worn, last, position)
    rest = recovery.keep_aside(worn, last, stop, tail, disk)
    if rest is not None:
        aside.append(rest)
    file.truncate(position - last.start)
    file.fdatasync()
    return aside


def _end_of(segment: Segment, disk: Disk) -> int:
    worn = WornFile(disk.open(segment.path))
    end = recovery.search(worn, segment, segment.start).nonzero_end
    # What cannot be read may be the last entries: better too much is said to be lost.
    return max([end, *(segment.start + page + PAGE_BYTES for page in worn.unread)])
