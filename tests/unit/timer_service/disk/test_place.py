import pytest

from duemq.errors import InvalidArgument
from duemq_server.timer_service.disk import place
from tests.crash.faulty_disk import FaultyDisk


def test_a_data_directory_stays_that_of_its_shard() -> None:
    disk = FaultyDisk()
    place.check("/data", disk, 1, 2)
    disk = disk.after_kill()
    place.check("/data", disk, 1, 2)
    for shard, shards in ((0, 2), (0, 1), (1, 3)):
        with pytest.raises(InvalidArgument, match=r"/data is that of shard 1 of 2.*--shards 2"):
            place.check("/data", disk, shard, shards)
