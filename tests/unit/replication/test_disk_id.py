from __future__ import annotations

import pytest

from duemq_server.replication import disk_id
from duemq_server.replication.disk_id import DiskId
from duemq_server.storage import checkpoint
from duemq_server.storage.errors import CorruptFile
from duemq_server.storage.replicas import DISK_ID_FILE
from tests.crash.faulty_disk import FaultyDisk, PowerCut

DATA = "/data"
ONE, OTHER = b"1" * 16, b"2" * 16


def made() -> FaultyDisk:
    disk = FaultyDisk()
    disk.makedirs(DATA)
    assert disk_id.load_or_make(DATA, disk, ONE) == DiskId(ONE)
    return disk


def test_a_directory_keeps_its_id() -> None:
    disk = made()
    assert disk_id.load_or_make(DATA, disk.after_power_cut(None), OTHER).id == ONE


def test_an_emptied_directory_has_another_one() -> None:
    disk = made()
    disk.unlink(f"{DATA}/{DISK_ID_FILE}")
    assert disk_id.load_or_make(DATA, disk, OTHER) == DiskId(OTHER)


def test_a_loss_makes_a_new_one() -> None:
    disk = made()
    disk_id.save(DATA, disk, DiskId(OTHER))
    assert disk_id.load_or_make(DATA, disk.after_power_cut(None), b"3" * 16) == DiskId(OTHER)


def test_the_epoch_that_the_log_has_held_is_kept_beside_it() -> None:
    disk = made()
    disk_id.save(DATA, disk, DiskId(ONE, 7))
    assert disk_id.load_or_make(DATA, disk.after_power_cut(None), OTHER) == DiskId(ONE, 7)


def test_an_id_from_before_epochs_were_kept_is_read() -> None:
    disk = made()
    checkpoint.save(f"{DATA}/{DISK_ID_FILE}", ONE, disk)
    assert disk_id.load_or_make(DATA, disk, OTHER) == DiskId(ONE)


def test_an_id_is_whole_or_not_there() -> None:
    for cut_at in range(1, 5):
        disk = FaultyDisk(cut_at=cut_at)
        disk.makedirs(DATA)
        with pytest.raises(PowerCut):
            disk_id.load_or_make(DATA, disk, ONE)
        assert disk_id.load_or_make(DATA, disk.after_power_cut(None), OTHER).id in (ONE, OTHER)


def test_what_is_no_id_is_refused() -> None:
    disk = made()
    checkpoint.save(f"{DATA}/{DISK_ID_FILE}", b"short", disk)
    with pytest.raises(CorruptFile, match="5 bytes, not 16"):
        disk_id.load_or_make(DATA, disk, OTHER)
