from __future__ import annotations

import pytest

from duemq_server.broker.store.recovery import REBUILDING, Marker
from duemq_server.storage.errors import DiskFull
from tests.crash.faulty_disk import FaultyDisk

DATA = "/data"


def test_a_marker_that_went_while_too_many_files_were_open_is_gone_by_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk()
    disk.makedirs(DATA)
    marker = Marker(DATA, REBUILDING, disk)
    marker.put(b"")

    def fsync_dir(path: str) -> None:
        raise DiskFull(f"open {path}: too many open files")

    with monkeypatch.context() as patch, pytest.raises(DiskFull):
        patch.setattr(disk, "fsync_dir", fsync_dir)
        marker.remove()
    marker.remove()
    assert Marker(DATA, REBUILDING, disk.after_power_cut(None)).value is None
