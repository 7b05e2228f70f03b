from __future__ import annotations

from random import Random

import google_crc32c
import pytest

from duemq_server.storage import checkpoint
from duemq_server.storage.errors import CorruptFile, DiskFull, UnknownVersion
from tests.crash.faulty_disk import FaultyDisk, PowerCut

PATH = "/state"


def test_there_is_no_state_at_first() -> None:
    assert checkpoint.load(PATH, FaultyDisk()) is None


def test_the_newest_state_is_loaded() -> None:
    disk = FaultyDisk()
    checkpoint.save(PATH, b"a much longer old state", disk)
    checkpoint.save(PATH, b"new", disk)
    assert checkpoint.load(PATH, disk.after_power_cut(None)) == b"new"
    assert disk.paths == [PATH]


def test_a_power_cut_leaves_the_old_state_or_the_new_one() -> None:
    cut_at = 0
    finished = False
    while not finished:
        cut_at += 1
        for seed in range(10):
            disk = FaultyDisk()
            checkpoint.save(PATH, b"old" * 300, disk)
            disk.cut_at = disk.operations + cut_at
            try:
                checkpoint.save(PATH, b"new" * 400, disk)
                finished = True
            except PowerCut:
                pass
            state = checkpoint.load(PATH, disk.after_power_cut(Random(seed)))
            assert state in ((b"new" * 400,) if finished else (b"old" * 300, b"new" * 400))
    assert cut_at > 4


def test_a_full_disk_leaves_the_old_state() -> None:
    disk = FaultyDisk()
    checkpoint.save(PATH, b"old", disk)
    disk.capacity_bytes = disk.used_bytes() + 10
    with pytest.raises(DiskFull):
        checkpoint.save(PATH, b"new" * 100, disk)
    assert checkpoint.load(PATH, disk) == b"old"


def test_what_a_full_disk_cut_short_takes_no_space() -> None:
    disk = FaultyDisk(capacity_bytes=50)
    with pytest.raises(DiskFull):
        checkpoint.save(PATH, b"new" * 100, disk)
    assert disk.paths == []


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    data = b"".join(checkpoint.encode([b"state"]))
    for at in range(len(data)):
        with pytest.raises(CorruptFile, match=r"/state, offset \d+: .*Restore the data directory"):
            checkpoint.decode(data[:at], PATH)
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptFile):
                checkpoint.decode(bytes(damaged), PATH)


def test_a_newer_version_is_not_taken_for_damage() -> None:
    data = bytearray(b"".join(checkpoint.encode([b"state"])))
    data[8] = 2
    data[:4] = google_crc32c.value(bytes(data[4:])).to_bytes(4, "little")
    with pytest.raises(UnknownVersion, match="version 2"):
        checkpoint.decode(bytes(data), PATH)
