from __future__ import annotations

from dataclasses import replace
from random import Random

import google_crc32c
import pytest

from duemq.errors import Corrupt, InvariantError, Unavailable
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq_server.storage import checkpoint
from duemq_server.storage.errors import CorruptFile, DiskFull
from duemq_server.storage.replicas import epoch
from duemq_server.timer_service.disk import checkpoint_state
from duemq_server.timer_service.disk.data_directory import load_checkpoint, open_directory
from duemq_server.timer_service.disk.snapshots import snapshot
from duemq_server.timer_service.disk.standby import Standby
from duemq_server.timer_service.scheduling import topic_counts
from duemq_server.timer_service.timers.limits import Limits
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.property.replicated_timer_world import ReplicatedWorld, arrived, snapshot_of
from tests.property.timer_world import DATA, LIMITS, SOURCE, START_MS, TOPICS, World

HOUR_MS = 3_600_000
SMALL = replace(LIMITS, log_segment_bytes=2 << 10)
NOTHING_HELD = replace(SMALL, log_held_max=2_000)


def opened(disk: FaultyDisk, now_ms: int = START_MS) -> Standby:
    return Standby.open(DATA, disk, SMALL, clock=lambda: now_ms)


def made(disk: FaultyDisk) -> FaultyDisk:
    for path in (DATA, f"{DATA}/log", f"{DATA}/segments"):
        disk.makedirs(path)
    return disk


def busy(timers: int = 100, limits: Limits = SMALL) -> ReplicatedWorld:
    """Some fired, some near, some far in files; the follower has all of the log."""
    world = ReplicatedWorld(1, limits)
    for n in range(timers):
        wait_ms = (0, 5_000, HOUR_MS * n)[n % 3]
        world.broker.accept([world.now_ms + wait_ms], 100, "any")
        world.ingest(1)
        world.tick()
        world.sync()
        world.housekeep()
        if n % 2:
            world.send()
    world.sync()
    return world


def far_behind(world: ReplicatedWorld) -> bytes:
    """The leader's log is cut; its snapshot."""
    world.now_ms += 10_000
    for _ in range(20):
        world.tick()
        world.sync()
        world.send()
        world.housekeep()
    world.checkpoint()
    assert world.log.start_position > 0
    return snapshot_of(world.disk)


# -- passes


def test_a_pass_waits_for_enough_log() -> None:
    world = busy()
    standby = world.standby
    limits = replace(SMALL, checkpoint_log_bytes=standby.log.end_position + 1)
    standby._limits = limits
    standby.apply(world.committed)
    assert (standby.applied, standby.known_to) == (world.committed, 0)

    standby._limits = replace(limits, checkpoint_log_bytes=standby.log.end_position)
    standby.apply(world.committed)
    assert standby.known_to == world.committed


@pytest.mark.parametrize("passed_ms", [SMALL.standby_interval_ms, -SMALL.standby_interval_ms])
def test_a_pass_comes_after_a_while_whatever_the_clock_does(passed_ms: int) -> None:
    world = busy(9)
    world.standby.apply(world.committed)
    assert world.standby.known_to == 0

    world._now_ms += passed_ms
    world.standby.checkpoint()

    assert world.standby.known_to == world.committed


def test_a_pass_takes_whole_entries_and_what_is_durable() -> None:
    world = busy(9)
    standby = world.standby
    first = next(standby.log.entries(0))
    standby.apply(first.end + 8)
    standby.pass_now()
    assert standby.known_to == first.end

    standby.apply(1 << 40)
    assert standby.applied == standby.log.durable_position


def test_a_follower_keeps_what_its_checkpoint_or_its_leader_needs() -> None:
    world = busy(limits=NOTHING_HELD)
    standby = world.standby
    end = standby.log.end_position

    standby.drop_before(end)
    assert standby.log.start_position == 0

    standby._leader_start = 0
    standby.apply(end)
    standby.pass_now()
    assert standby.log.start_position == 0

    standby.drop_before(end)
    found = load_checkpoint(DATA, world.standby_disk)
    assert found is not None
    assert 0 < standby.log.start_position <= found.log_needed_from


def test_what_fired_in_time_is_not_remembered_as_late_by_a_pass() -> None:
    world = busy(30)
    world.standby.apply(world.committed)

    world.now_ms += SMALL.standby_interval_ms
    world.standby.checkpoint()

    found = load_checkpoint(DATA, world.standby_disk)
    assert found is not None
    assert found.ledger.fired
    assert not found.fired_late


def test_topics_that_come_and_go_do_not_fill_what_a_follower_tells_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a takeover all new ones were counted together, as long as one of these waited."""
    monkeypatch.setattr(topic_counts, "TOPICS_MAX", 4)
    monkeypatch.setattr(topic_counts, "FOLLOWED_MAX", 2)
    monkeypatch.setattr(topic_counts, "SHOWN_MAX", 0)
    world = ReplicatedWorld(1, SMALL)
    for number in range(6):
        monkeypatch.setitem(TOPICS, f"topic-{number}", -1)
        world.set_topics([f"topic-{number}"])
        world.broker.accept([world.now_ms] * 2, 10, f"topic-{number}")
        world.ingest(1)
        for _ in range(2):
            world.tick()
            world.sync()
            world.send()
        world.sync()
        world.standby_checkpoint()
    state = load_checkpoint(DATA, world.standby_disk)
    assert state is not None

    assert list(state.topics) == ["topic-4", "topic-5"]
    accepted, fired, *rest = state.topics_forgotten
    assert (accepted, fired, any(rest)) == (8, 8, False)


def test_a_follower_appends_nothing() -> None:
    world = busy(3)
    standby = world.standby
    standby.log.append(epoch.KIND, [epoch.encode(9, bytes(16), 0)])
    with pytest.raises(InvariantError, match="not durable to its end"):
        standby.promote()


# -- opening


def test_a_shard_without_replicas_becomes_one_and_is_one_again() -> None:
    alone = World(limits=SMALL)
    alone.broker.accept([START_MS, START_MS + HOUR_MS], 10, "keyed")
    alone.ingest(1)
    alone.sync()
    alone.checkpoint()
    disk = alone.disk.after_kill()

    standby = opened(disk)
    assert standby.epochs == ((0, 0),)
    assert standby.store_id == alone.directory.producer_id
    assert not standby.lost
    start, _ = standby.log.append(epoch.KIND, [epoch.encode(1, bytes(16), START_MS)])
    while standby.log.write_pending():
        pass
    directory = standby.promote()
    assert directory.scheduler.ledger.pending == 2
    directory.log.close()

    assert opened(disk.after_kill()).epochs == ((0, 0), (1, start))
    again = open_directory(DATA, disk.after_kill(), SMALL, START_MS)
    assert again.producer_id == alone.directory.producer_id
    assert again.scheduler.ledger.pending == 2


def test_checkpoints_keep_the_epochs_that_the_log_still_has() -> None:
    world = busy(limits=NOTHING_HELD)
    for _ in range(4):
        world.kill()
        world.now_ms += 10_000
        for _ in range(40):
            world.broker.accept([world.now_ms], 100, "any")
            world.ingest(1)
            world.tick()
            world.sync()
            world.send()
            world.housekeep()
        world.checkpoint()
    begins = world.directory.housekeeper.save(world.now_ms).state.epochs
    assert 0 < len(begins) < world.epoch
    assert begins[0][1] < world.log.start_position
    assert begins[-1] == world._epochs[-1]


@pytest.mark.parametrize("store_id", [77, SERVICE_IDS_FROM + 77])
def test_a_replica_takes_the_groups_id_over_and_keeps_it(store_id: int) -> None:
    disk = made(FaultyDisk())
    standby = opened(disk)
    standby.rename(store_id)
    standby = opened(disk.after_power_cut())
    assert standby.store_id == store_id
    assert standby.promote().producer_id == SERVICE_IDS_FROM + 77


def test_another_id_leaves_all_else_as_it_is() -> None:
    world = busy()
    world.standby.apply(world.committed)
    world.standby.pass_now()
    before = load_checkpoint(DATA, world.standby_disk)
    world.standby.rename(77)
    after = load_checkpoint(DATA, world.standby_disk)
    assert before is not None
    assert after is not None
    assert after.held
    assert [each.crc32c for each in after.held] == [each.crc32c for each in before.held]
    assert after.ledger == before.ledger
    assert (after.store_id, after.producer_id) == (77, SERVICE_IDS_FROM + 77)


def test_a_log_without_a_checkpoint_is_refused() -> None:
    world = busy(3)
    world.standby_disk.unlink(f"{DATA}/checkpoint")
    with pytest.raises(Corrupt, match="there is no checkpoint"):
        opened(world.standby_disk)


def test_a_log_that_lost_its_end_gets_it_again() -> None:
    world = busy(30)
    world.standby.apply(world.committed)
    world.standby.pass_now()
    disk = world.standby_disk.after_kill()
    first = next(world.log.entries(0))
    for name in disk.listdir(f"{DATA}/log")[1:]:
        disk.unlink(f"{DATA}/log/{name}")
    disk.chop(f"{DATA}/log/{0:020d}", first.end)

    standby = opened(disk)
    assert standby.lost
    assert standby.log.catching_up
    assert standby.applied == standby.committed == standby.log.end_position == first.end
    with pytest.raises(Corrupt, match="acknowledged timers are gone"):
        standby.promote()

    world.standby_disk, world.alone = disk, True
    world.standby_restarts = lambda disk=None: None  # type: ignore[method-assign]
    standby = world.standby = opened(disk)
    standby.apply(world.committed)
    standby.pass_now()
    world.sync()
    assert not standby.log.catching_up
    standby.apply(world.committed)
    world.kill()
    world.drain()


# -- snapshots


def test_a_snapshot_is_what_it_was() -> None:
    world = busy()
    data = far_behind(world)
    disk = made(FaultyDisk())
    state = arrived(opened(disk), data).state
    assert state.lengths
    for name, length in state.lengths.items():
        ours = world.disk.content(f"{DATA}/segments/{name}")[:length]
        assert disk.content(f"{DATA}/arriving/{name}") == ours
    saved = checkpoint.load(f"{DATA}/checkpoint", world.disk)
    assert saved == data[snapshot.HEADER_BYTES :][: len(saved or b"")]


def as_older_releases_send_it(disk: FaultyDisk) -> bytes:
    """Version 1, written here as the release did it that knew no other."""
    payload = checkpoint.load(f"{DATA}/checkpoint", disk)
    assert payload is not None
    lengths = checkpoint_state.decode(payload).lengths
    files = [disk.content(f"{DATA}/segments/{name}")[: lengths[name]] for name in sorted(lengths)]
    head = b"DMQS" + (1).to_bytes(2, "little") + bytes(6) + len(payload).to_bytes(8, "little")
    rest = b"".join((head, payload, *files))
    return google_crc32c.value(rest).to_bytes(4, "little") + rest


def test_a_snapshot_goes_to_an_older_release_and_comes_from_one() -> None:
    world = busy()
    newer = far_behind(world)
    older = snapshot_of(world.disk, version=snapshot.VERSION_1)
    assert older == as_older_releases_send_it(world.disk)
    disks = [made(FaultyDisk()), made(FaultyDisk())]
    states = [
        arrived(opened(disk), data).state for disk, data in zip(disks, (newer, older), strict=True)
    ]
    assert states[0].lengths
    assert checkpoint_state.encode(states[0]) == checkpoint_state.encode(states[1])
    for name in states[0].lengths:
        there = [disk.content(f"{DATA}/arriving/{name}") for disk in disks]
        assert there[0] == there[1]


def test_a_snapshot_that_an_older_release_cannot_take_is_not_sent_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = busy()
    size = len(far_behind(world))
    monkeypatch.setattr(snapshot, "VERSION_1_BYTES_MAX", size // 2)
    with pytest.raises(Unavailable, match="start it in the leader's release"):
        snapshot_of(world.disk, version=snapshot.VERSION_1)
    assert len(snapshot_of(world.disk)) == size


def both_versions() -> list[bytes]:
    world = busy()
    return [far_behind(world), as_older_releases_send_it(world.disk)]


@pytest.mark.parametrize("data", both_versions(), ids=["2", "1"])
def test_a_snapshot_with_a_wrong_bit_is_refused(data: bytes) -> None:
    for at in [*range(0, len(data), 397), len(data) - 1]:
        wrong = bytearray(data)
        wrong[at] ^= 1
        with pytest.raises((ValueError, DiskFull), match="snapshot"):
            arrived(opened(made(FaultyDisk())), bytes(wrong))


@pytest.mark.parametrize("data", both_versions(), ids=["2", "1"])
def test_a_snapshot_that_ends_too_early_or_too_late_is_refused(data: bytes) -> None:
    for length in (0, 20, 1_000, len(data) - 4, len(data) - 1):
        with pytest.raises(ValueError, match="ends too early"):
            arrived(opened(made(FaultyDisk())), data[:length]).install(0)
    with pytest.raises(ValueError, match="behind its end"):
        arrived(opened(made(FaultyDisk())), data + b"x")


@pytest.mark.parametrize("name", ["../checkpoint", "x.due", "0000000001-00001.due/.."])
def test_a_snapshot_with_a_file_of_another_directory_is_refused(name: str) -> None:
    payload = checkpoint_state.encode(replace(checkpoint_state.empty(7), lengths={name: 3}))
    with pytest.raises(ValueError, match="file"):
        arrived(opened(made(FaultyDisk())), snapshot.encode_header(payload) + payload + b"abc")


def test_a_snapshot_for_which_there_is_no_space_writes_no_file() -> None:
    data = far_behind(busy())
    disk = made(FaultyDisk())
    standby = opened(disk)
    disk.capacity_bytes = disk.used_bytes() + SMALL.free_bytes_min + 2_000
    with pytest.raises(DiskFull, match="bytes of files"):
        arrived(standby, data)
    assert disk.listdir(f"{DATA}/arriving") == []


def test_what_is_sent_is_the_checkpoints_whatever_happens_to_the_files_meanwhile() -> None:
    world = busy()
    data = far_behind(world)
    leaving = snapshot.take(DATA, world.disk)
    assert leaving is not None
    parts = [leaving.read(100)]
    for name in world.disk.listdir(f"{DATA}/segments"):
        path = f"{DATA}/segments/{name}"
        size = len(world.disk.content(path))
        world.disk.open(path).pwritev([b"behind it"], size)
        if size % 2:
            world.disk.unlink(path)
    parts += iter(lambda: leaving.read(1_000), b"")
    assert b"".join(parts) == data


def test_files_that_a_newer_checkpoint_took_away_are_no_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is one that was made anew under the same name taken for the older one."""
    world = busy()
    data = far_behind(world)
    older = checkpoint_state.empty(7)
    older.lengths = {"0000000001-00001.due": 8}
    saved = [checkpoint_state.encode(replace(older, position=n)) for n in range(3)]
    loads = [saved[0], saved[1]]
    load = checkpoint.load
    monkeypatch.setattr(
        checkpoint, "load", lambda path, disk: loads.pop(0) if loads else load(path, disk)
    )
    assert snapshot_of(world.disk) == data

    loads = [*saved, *saved]
    with pytest.raises(Unavailable, match="try again"):
        snapshot.take(DATA, world.disk)


@pytest.mark.parametrize("cut", [True, False])
def test_files_that_are_damaged_are_said(cut: bool) -> None:
    world = busy()
    far_behind(world)
    name = min(load_lengths(world.disk))
    if cut:
        world.disk.chop(f"{DATA}/segments/{name}", 100)
    else:
        world.disk.unlink(f"{DATA}/segments/{name}")
    with pytest.raises(CorruptFile, match=name):
        snapshot.take(DATA, world.disk)


def load_lengths(disk: FaultyDisk) -> dict[str, int]:
    found = load_checkpoint(DATA, disk)
    assert found is not None
    return found.lengths


def test_a_snapshot_needs_the_log_that_goes_with_it() -> None:
    world = busy()
    data = far_behind(world)
    standby = opened(made(FaultyDisk()))
    arriving = arrived(standby, data)
    for start in (arriving.state.log_needed_from + 8, 4):
        with pytest.raises(ValueError, match="does not go with"):
            arriving.install(start)
    assert not standby.log.start_position
    arriving.close()
    assert not standby._disk.exists(f"{DATA}/arriving")


def test_who_has_a_snapshot_without_its_log_says_that_it_cannot_lead() -> None:
    world = busy()
    data = far_behind(world)
    standby = opened(made(FaultyDisk()))
    assert not standby.unfit
    arriving = arrived(standby, data)
    arriving.install(world.log.start_position)
    arriving.close()
    assert f"its log ends at {world.log.start_position}" in standby.unfit
    assert standby.known_to > standby.log.end_position
    with pytest.raises(Corrupt):
        standby.promote()
    while standby.log.end_position < world.log.written_position:
        end = standby.log.end_position
        standby.log.extend(end, [world.log.read_run(end, 1_000)])
    assert not standby.unfit


def test_whenever_a_snapshot_is_interrupted_the_replica_gets_all_in_the_end() -> None:
    world = busy()
    data = far_behind(world)
    start = world.log.start_position
    operations = 0
    ends = set()
    while True:
        operations += 1
        disk = made(FaultyDisk())
        standby = opened(disk)
        standby.rename(world.directory.producer_id)
        standby.log.append(epoch.KIND, [epoch.encode(1, bytes(16), 0)])  # of old
        standby.log.write_pending()
        old = standby.log.end_position
        disk.cut_at = disk.operations + operations
        arriving = None
        try:
            arriving = arrived(standby, data)
            arriving.install(start)
            arriving.close()
            disk.cut_at = None
            break
        except PowerCut:
            disk = disk.after_power_cut(Random(operations))
        again = opened(disk)
        ends.add(again.log.end_position)
        assert again.store_id == world.directory.producer_id
        assert not disk.exists(f"{DATA}/installing")
        assert not disk.exists(f"{DATA}/arriving")
        if arriving is None:  # nothing had changed
            assert again.log.end_position == old
        if not again.known_to:
            arrived(again, data).install(start)
        follow_to_the_end(world, again)
    follow_to_the_end(world, standby)
    assert {0, old, start} <= ends
    assert operations > 10


def test_a_disk_that_is_full_while_a_snapshot_arrives_changes_nothing() -> None:
    world = busy()
    data = far_behind(world)
    disk = made(FaultyDisk())
    standby = opened(disk)
    standby.rename(world.directory.producer_id)
    before = {path: disk.content(path) for path in disk.paths}
    arriving = standby.receive()
    half = len(data) // 2
    arriving.write(data[:half])
    disk.capacity_bytes = disk.used_bytes() + 50
    with pytest.raises(DiskFull):
        arriving.write(data[half:])
    arriving.close()
    assert {path: disk.content(path) for path in disk.paths} == before
    disk.capacity_bytes = None
    arrived(standby, data).install(world.log.start_position)
    follow_to_the_end(world, standby)


# -- the log that goes with a snapshot


def test_the_log_is_kept_for_who_catches_up_and_cut_when_nobody_does() -> None:
    world = busy()
    keeper, log = world.directory.housekeeper, world.log
    needed: int | None = log.segments[1].start
    keeper.others_need = lambda: needed
    far_behind(world)
    assert log.start_position == needed

    needed = log.segments[2].start
    keeper.next_job(world.now_ms)
    assert log.start_position == needed

    needed = None  # nor is another checkpoint necessary
    keeper.next_job(world.now_ms)
    assert log.start_position == log_cut_to(world)


def log_cut_to(world: ReplicatedWorld) -> int:
    """Where the segment begins that its last checkpoint needs."""
    found = load_checkpoint(DATA, world.disk)
    assert found is not None
    kept = min(found.log_needed_from, found.position - world.limits.log_kept_bytes)
    return max(each.start for each in world.log.segments if each.start <= kept)


def follow_to_the_end(world: ReplicatedWorld, standby: Standby) -> None:
    """It gets the log, restarts on the way, and could lead."""
    log = world.log
    while standby.log.end_position < log.written_position:
        standby.log.extend(
            standby.log.end_position, [log.read_run(standby.log.end_position, 1_000)]
        )
        standby.log.write_pending()
        standby = opened(standby._disk, world.now_ms)  # type: ignore[arg-type]
        assert not standby.lost
        assert (
            standby.epochs[-1] == [x for x in world._epochs if x[1] < standby.log.end_position][-1]
        )
        standby.apply(world.committed)
        standby.pass_now()
    assert standby.known_to == world.committed
    led = standby.promote().scheduler
    assert led.ledger == world.scheduler.ledger
    assert led.numbers.source(SOURCE).next_offset == len(world.broker.due_ms)  # type: ignore[union-attr]
    led.check()


def test_a_checkpoint_is_the_same_read_and_written_again() -> None:
    world = busy()
    far_behind(world)
    payload = checkpoint.load(f"{DATA}/checkpoint", world.disk)
    assert payload is not None
    state = checkpoint_state.decode(payload)
    assert state.epochs
    assert checkpoint_state.encode(state) == payload
