import pytest

from duemq_server.storage import starts
from duemq_server.storage.errors import DiskFull
from tests.crash.faulty_disk import FaultyDisk

DIRECTORY = "/data"
PATH = f"{DIRECTORY}/{starts.FILE_NAME}"


@pytest.fixture
def disk() -> FaultyDisk:
    disk = FaultyDisk()
    disk.makedirs(DIRECTORY)
    return disk


def test_a_process_began_when_the_clock_says_so(disk: FaultyDisk) -> None:
    assert starts.begin(DIRECTORY, disk, 1_000) == 1_000
    assert starts.begin(DIRECTORY, disk, 1_001) == 1_001


def test_a_process_began_after_the_one_before_whatever_the_clock_says(disk: FaultyDisk) -> None:
    assert starts.begin(DIRECTORY, disk, 1_000) == 1_000
    disk = disk.after_power_cut(None)
    assert starts.begin(DIRECTORY, disk, 400) == 1_001
    assert starts.begin(DIRECTORY, disk, 1_000) == 1_002
    assert starts.begin(DIRECTORY, disk, 2_000) == 2_000


def test_a_damaged_file_keeps_nobody_from_its_start(disk: FaultyDisk, caplog) -> None:
    starts.begin(DIRECTORY, disk, 1_000)
    disk.flip(PATH, len(disk.content(PATH)) - 1)
    assert starts.begin(DIRECTORY, disk, 400) == 400
    assert PATH in caplog.text
    assert "Nothing is to be done" in caplog.text  # a copy would lack what came since
    assert starts.begin(DIRECTORY, disk, 300) == 401


def test_nor_does_one_on_a_bad_sector(disk: FaultyDisk, caplog) -> None:
    starts.begin(DIRECTORY, disk, 1_000)
    disk.wear_out(PATH, 0)
    assert starts.begin(DIRECTORY, disk, 400) == 400
    assert f"{PATH}, offset 0: Input/output error" in caplog.text
    assert starts.begin(DIRECTORY, disk, 300) == 401


def test_a_full_disk_keeps_nobody_from_its_start(disk: FaultyDisk, monkeypatch, caplog) -> None:
    starts.begin(DIRECTORY, disk, 1_000)

    def is_full(*_: object) -> None:
        raise DiskFull("no space left")

    with monkeypatch.context() as full:
        full.setattr("duemq_server.storage.checkpoint.write_whole", is_full)
        assert starts.begin(DIRECTORY, disk, 400) == 1_001
    assert "no space left" in caplog.text
    assert starts.begin(DIRECTORY, disk, 400) == 1_001
