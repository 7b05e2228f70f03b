"""What indexes weigh, read from files as the timer service writes them."""

import struct
from pathlib import Path

from duemq_server.bench.matrix.segments import IndexSize, index_size
from duemq_server.storage.record import encode
from duemq_server.timer_service.far.far_block import BODIES, INDEX


def entry(kind: int, body: bytes) -> bytes:
    return b"".join(map(bytes, encode(kind, [body], len(body), 0, 0)))


def write(directory: Path, name: str, *entries: bytes) -> None:
    (directory / "segments").mkdir(exist_ok=True)
    (directory / "segments" / name).write_bytes(b"".join(entries))


def test_only_indexes_count(tmp_path: Path) -> None:
    block = entry(INDEX, struct.pack("<I", 3) + bytes(60)), entry(BODIES, bytes(5_000))
    write(tmp_path, "1-1.due", *block, *block)
    write(tmp_path, "2-1.due", *block)
    write(tmp_path, "other.tmp", *block)
    assert index_size(tmp_path) == IndexSize(9, 3 * 96)
    assert index_size(tmp_path).bytes_per_timer == 32


def test_a_file_that_is_being_written_counts_as_far_as_it_goes(tmp_path: Path) -> None:
    block = entry(INDEX, struct.pack("<I", 2) + bytes(28))
    write(tmp_path, "1-1.due", block, bytes(4_096))
    write(tmp_path, "2-1.due", block, block[:20])
    assert index_size(tmp_path) == IndexSize(4, 2 * len(block))


def test_nothing_is_on_the_disk(tmp_path: Path) -> None:
    assert index_size(tmp_path).bytes_per_timer is None
