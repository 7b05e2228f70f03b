"""The file of ids that a group had before losses."""

import pytest

from duemq_server.replication import formers
from duemq_server.storage.errors import CorruptFile
from tests.crash.faulty_disk import FaultyDisk


def test_what_is_saved_is_there_after_a_power_failure() -> None:
    disk = FaultyDisk()
    disk.makedirs("/data")
    assert formers.load("/data", disk) == ()
    formers.save("/data", disk, (1, (1 << 64) - 1))
    assert formers.load("/data", disk.after_power_cut(None)) == (1, (1 << 64) - 1)


def test_damage_is_told_with_what_helps() -> None:
    disk = FaultyDisk()
    disk.makedirs("/data")
    formers.save("/data", disk, (7,))
    disk.flip("/data/formers", 30)
    with pytest.raises(CorruptFile, match="Remove /data/formers"):
        formers.load("/data", disk)
