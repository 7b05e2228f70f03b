import pytest

from duemq.errors import InvalidArgument, Unavailable
from duemq.protocol import timer_keys
from duemq_server.storage import checkpoint
from duemq_server.timer_service.disk import place
from tests.crash.faulty_disk import FaultyDisk


def test_a_data_directory_stays_that_of_its_shard() -> None:
    disk = FaultyDisk()
    place.check("/data", disk, 1, 2)
    disk = disk.after_kill()
    place.check("/data", disk, 1, 2)
    with pytest.raises(InvalidArgument, match=r"/data is that of shard 1, not of shard 0"):
        place.check("/data", disk, 0, 2)


def test_a_new_one_is_of_a_shard_that_there_is() -> None:
    disk = FaultyDisk()
    with pytest.raises(InvalidArgument, match="shard is 1, must be below shards, 1"):
        place.check("/data", disk, 1, 1)
    assert not place.check("/data", disk, 1, 2).leaves


def test_the_new_disk_of_a_replica_may_be_of_one_that_leaves() -> None:
    disk = FaultyDisk()
    assert place.check("/data", disk, 1, 1, may_leave=True).leaves
    disk = disk.after_kill()
    found = place.check("/data", disk, 1, 1)  # as whoever leads looks at it
    assert (found.leaves, found.key_shards, found.returns) == (True, 0, False)
    found.learn(2)
    assert place.check("/data", disk.after_kill(), 1, 2).returns


def test_keys_stay_divided_as_they_were_first() -> None:
    disk = FaultyDisk()
    place.check("/data", disk, 1, 2).learn(2)
    for shards in (4, 3, 1):
        disk = disk.after_kill()
        found = place.check("/data", disk, 1, shards)
        assert (found.shards, found.key_shards, found.leaves) == (shards, 2, shards == 1)
        found.learn(7)
        assert found.key_shards == 2


def test_who_had_left_returns_until_it_has_learnt_what_is_held() -> None:
    disk = FaultyDisk()
    assert not place.check("/data", disk, 1, 2).returns
    assert not place.check("/data", disk, 1, 4).returns
    assert not place.check("/data", disk, 1, 1).returns
    for _ in range(2):
        disk = disk.after_kill()
        found = place.check("/data", disk, 1, 2)
        assert found.returns
    found.returned()
    assert not place.check("/data", disk.after_kill(), 1, 2).returns


def test_a_full_disk_notes_another_number_at_a_later_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FaultyDisk()
    place.check("/data", disk, 1, 4)
    disk.capacity_bytes = 0
    assert place.check("/data", disk, 1, 2).shards == 2
    assert "one of 2 shards now is not noted: write /data/shard.tmp: no space left" in caplog.text
    assert place.check("/data", disk, 1, 1).leaves  # its log says so before it hands over
    disk.capacity_bytes = None
    assert place.check("/data", disk, 1, 1).leaves
    for _ in range(2):
        disk = disk.after_kill()
        disk.capacity_bytes = 0
        assert place.check("/data", disk, 1, 2).returns
    disk.capacity_bytes = None
    place.check("/data", disk, 1, 2).returned()
    assert not place.check("/data", disk.after_kill(), 1, 2).returns


def test_a_directory_of_a_release_that_could_not_change_the_number() -> None:
    disk = FaultyDisk()
    disk.makedirs("/data")
    checkpoint.save("/data/shard", b'{"shard": 0, "shards": 1}', disk)
    assert place.check("/data", disk, 0, 2).key_shards == 1
    assert place.check("/data", disk.after_kill(), 0, 4).key_shards == 1


def test_what_is_not_known_yet_is_not_guessed() -> None:
    disk = FaultyDisk()
    place.check("/data", disk, 0, 2)
    found = place.check("/data", disk.after_kill(), 0, 4)
    for ask in (lambda: found.check_key("orders", "k"), lambda: found.check_schedule("s")):
        with pytest.raises(Unavailable, match="no broker has told"):
            ask()
    found.learn(1)
    found.check_key("orders", "k")
    found.check_schedule("s")


def test_another_shards_names() -> None:
    found = place.check("/data", FaultyDisk(), 1, 4)
    found.learn(2)
    found.check_key("orders", "b")
    with pytest.raises(Unavailable, match=r"belongs to shard 0 of 2, this is shard 1"):
        found.check_key("orders", "d")
    found.check_schedule("a")
    with pytest.raises(Unavailable, match=r"belongs to shard 0 of 2, this is shard 1"):
        found.check_schedule("d")


def of_four(shard: int) -> place.ShardPlace:
    found = place.check("/data", FaultyDisk(), shard, 4)
    found.learn(4)
    return found


def test_another_shards_schedule_is_said() -> None:
    owner = timer_keys.shard_of_schedule("beat", 4)
    of_four(owner).check_schedule("beat")
    with pytest.raises(Unavailable, match=f"'beat' belongs to shard {owner} of 4, this") as raised:
        of_four((owner + 1) % 4).check_schedule("beat")
    assert (raised.value.field, raised.value.value) == ("name", "beat")


def test_another_shards_key_is_said() -> None:
    owner = timer_keys.shard_of("orders", "k", 4)
    of_four(owner).check_key("orders", "k")
    with pytest.raises(Unavailable, match=f"belongs to shard {owner} of 4, this") as raised:
        of_four((owner + 1) % 4).check_key("orders", "k")
    assert raised.value.retryable
