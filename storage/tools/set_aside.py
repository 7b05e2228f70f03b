"""Setting one damaged entry of a log aside: an operator accepts the loss of it alone.

In its place comes an entry of kind GAP and the same length, so that all others stay where they are.
Its bytes are kept beside the log as `<segment>.aside-<position>`.  What a gap means is the owner's
business: a broker's consumers go on behind it (broker/reading/reader.py).
"""

from __future__ import annotations

from duemq_server.storage import record, recovery
from duemq_server.storage.disk import Disk, ReadableFile, write_all, write_whole
from duemq_server.storage.log_parts.worn_file import WornFile
from duemq_server.storage.record import InvalidEntryError
from duemq_server.storage.segment import Segment, list_segments

GAP = 15
"""Kind of an entry that stands for one that was damaged; its body is zeros."""


def set_aside(directory: str, position: int, disk: Disk) -> tuple[str, int]:
    """Does it; answers the copy's path and where the next entry begins.

    Raises ValueError unless the segment's first damage begins at exactly `position`, and something
    valid follows.
    """
    holding = [each for each in list_segments(directory, disk) if each.start <= position]
    if not holding:
        raise ValueError(f"{directory} does not hold position {position}")
    segment = holding[-1]
    file = disk.open(segment.path)
    try:
        worn = WornFile(file)
        end = _end_of_damage(worn, segment, position, directory)
        path = _keep(worn, segment, position, end, disk)
        disk.fsync_dir(directory)
        length = end - position - record.HEADER_BYTES
        gap = record.encode(GAP, [bytes(length)], length, position, 0)
        write_all(file, gap, position - segment.start)
        file.fdatasync()
    finally:
        file.close()
    return path, end


def _end_of_damage(file: ReadableFile, segment: Segment, position: int, directory: str) -> int:
    scan = recovery.Scan(file, segment, segment.start)
    for _ in scan:
        pass
    if scan.stop.position != position:
        raise ValueError(
            f"{segment.path} is sound up to {scan.stop.position} ({scan.stop.reason}): only what"
            " begins there can be set aside"
        )
    header = file.pread(record.HEADER_BYTES, position - segment.start)
    length = record.plausible_length(header) if len(header) == record.HEADER_BYTES else 0
    if length and _is_valid(file, segment, position + length):
        return position + length
    found = recovery.search(file, segment, position).valid_position
    if found is None:
        raise ValueError(
            f"nothing valid follows {position} in {segment.path}: end the log there with"
            f" `duemq-storage cut {directory} --at {position}`"
        )
    return found


def _is_valid(file: ReadableFile, segment: Segment, position: int) -> bool:
    at = position - segment.start
    header = file.pread(record.HEADER_BYTES, at)
    if len(header) < record.HEADER_BYTES:
        return at == file.size()
    length = record.plausible_length(header)
    try:
        return bool(length) and bool(record.decode(file.pread(length, at), 0, position))
    except InvalidEntryError:
        return False


def _keep(file: ReadableFile, segment: Segment, position: int, end: int, disk: Disk) -> str:
    path = f"{segment.path}.aside-{position}"
    if disk.exists(path):  # an earlier try was cut short: the first copy is the good one
        return path
    write_whole(path, [file.pread(end - position, position - segment.start)], disk)
    return path
