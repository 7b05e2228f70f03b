"""Jobs on what is pending, between other work: while there is no room."""

import asyncio
from typing import cast

import pytest

from duemq.errors import TopicNotFound
from duemq.v1.timer_pb2 import ChangePendingRequest
from duemq_server.storage.errors import DiskFull
from duemq_server.timer_service import bulk_loop
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.bulk_requests import BulkRequests, which_of
from duemq_server.timer_service.far import bodies
from duemq_server.timer_service.scheduling.bulk.jobs import Which
from duemq_server.timer_service.timers.limits import Limits
from tests.manual_loop import AtOnce, ManualLoop
from tests.property.timer_world import START_MS
from tests.unit.timer_service.test_shard import MINUTE_MS, Quiet, loop, run

__all__ = ["loop"]

ALL = Which("any", "", 0, 1 << 60, None)
ID, OTHER_ID = b"j" * 16, b"k" * 16


@pytest.mark.parametrize("which", [ALL._replace(by_ms=MINUTE_MS), ALL._replace(to_topic="keyed")])
def test_what_brings_timers_anew_waits_for_space(
    loop: ManualLoop, which: Which, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS, 60 * MINUTE_MS)
        quiet.world.fill_disk(Limits().free_bytes_min - 1)
        asked = asyncio.create_task(quiet.shard.bulk.change(ID, which, 600.0))
        await loop.silence(5)
        job = quiet.shard.scheduler.bulk.open
        assert job is not None
        assert job.count == 0
        quiet.world.free_disk()
        await loop.silence(1)
        done = await asked
        assert done is not None
        assert done.count == 2
        assert done.over_ms

    run(loop, main)


def test_a_cancel_makes_room_and_waits_for_none(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS, 60 * MINUTE_MS)
        quiet.world.fill_disk(Limits().free_bytes_min - 1)
        done = await quiet.shard.bulk.change(ID, ALL, 600.0)
        assert done is not None
        assert done.count == 2

    run(loop, main)


SHIFT = ALL._replace(by_ms=MINUTE_MS)
MOVE = ALL._replace(to_topic="keyed")
SOME = ALL._replace(to_ms=START_MS + 90 * MINUTE_MS)


def test_a_move_waits_until_it_is_known_who_serves_the_other_topic(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start goes on with one before it knows the routes."""
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS)
        with monkeypatch.context() as patched:
            patched.setattr(quiet.shard.scheduler.dispatcher, "_routes_known", False)
            job = await quiet.shard.bulk.change(ID, MOVE, 5.0)
            assert job is not None
            assert not job.count
        done = await quiet.shard.bulk.change(ID, MOVE, 5.0)
        assert done is not None
        assert (done.count, bool(done.over_ms)) == (1, True)

    run(loop, main)


def test_a_cancel_passes_a_move_that_waits_for_routes(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nameservers may be away for long."""
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    move = MOVE._replace(to_topic="third")

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS)
        await quiet.take(60 * MINUTE_MS, topic="keyed")
        with monkeypatch.context() as patched:
            patched.setattr(quiet.shard.scheduler.dispatcher, "_routes_known", False)
            assert await quiet.shard.bulk.change(ID, move, 5.0)
            done = await quiet.shard.bulk.change(OTHER_ID, ALL._replace(topic="keyed"), 5.0)
            assert done is not None
            assert (done.count, bool(done.over_ms)) == (1, True)
        moved = await quiet.shard.bulk.change(ID, move, 5.0)
        assert moved is not None
        assert (moved.count, bool(moved.over_ms)) == (1, True)

    run(loop, main)


@pytest.mark.parametrize(("topic", "count"), [("any", 2), ("keyed", 1)])
def test_a_cancel_passes_what_waits_for_space(
    loop: ManualLoop, topic: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes what the other one waits for; each goes on where it is, also in another process."""
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS, topic=topic)
        await quiet.take(60 * MINUTE_MS)
        quiet.world.fill_disk(Limits().free_bytes_min - 1)
        jobs = quiet.shard.scheduler.bulk
        waits = asyncio.create_task(quiet.shard.bulk.change(ID, SHIFT, 60.0))
        await loop.silence(5)
        done = await quiet.shard.bulk.change(OTHER_ID, ALL._replace(topic=topic), 600.0)
        assert done is not None
        assert done.over_ms
        assert done.count == count
        await loop.silence(5)
        assert not waits.done()
        assert jobs.open is not None
        assert (jobs.open.id, jobs.behind) == (ID, None)
        assert await waits == jobs.open
        await quiet.kill()
        quiet.shard.bulk.start()
        quiet.world.free_disk()
        await loop.silence(1)
        last = await quiet.shard.bulk.change(ID, SHIFT, 600.0)
        assert last is not None
        assert last.over_ms
        assert last.count == 2 - count

    run(loop, main)


@pytest.mark.parametrize(
    ("first", "which"),
    [(SHIFT, SOME), (MOVE, ALL), (MOVE, ALL._replace(topic="keyed")), (SHIFT, SHIFT), (MOVE, MOVE)],
)
def test_what_would_come_to_another_thing_waits_behind_it(
    loop: ManualLoop, first: Which, which: Which, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS)
        quiet.world.fill_disk(Limits().free_bytes_min - 1)
        assert await quiet.shard.bulk.change(ID, first, 1.0)
        assert await quiet.shard.bulk.change(OTHER_ID, which, 1.0) is None
        quiet.world.free_disk()
        last = await quiet.shard.bulk.change(OTHER_ID, which, 600.0)
        assert last is not None
        assert last.over_ms
        job = quiet.shard.scheduler.bulk.find(ID)
        assert job is not None
        assert (bool(job.over_ms), job.count) == (True, 1)

    run(loop, main)


def test_with_space_jobs_take_their_turns(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS)
        asked = [(ID, SHIFT), (OTHER_ID, ALL)]
        jobs = await asyncio.gather(*(quiet.shard.bulk.change(*each, 600.0) for each in asked))
        assert [job and job.count for job in jobs] == [1, 1]

    run(loop, main)


async def write_out(quiet: Quiet) -> None:
    """What waits for its hour lies in blocks."""
    tiers = quiet.shard.scheduler.tiers
    flush = tiers.begin_flush(quiet.loop.wall_ms)
    flush.run()
    tiers.end_flush(flush)


def test_a_bad_sector_is_told_and_ends_no_process(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would be at it again with each start."""
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS)
        await write_out(quiet)
        await quiet.take(60 * MINUTE_MS)
        segments = quiet.shard.scheduler.segments
        [block] = segments.blocks()
        quiet.world.disk.wear_out(segments.path(block.file), block.position)
        done = await quiet.shard.bulk.change(ID, ALL, 600.0)
        assert done is not None
        assert (done.count, done.over_ms > 0) == (1, True)
        assert "Input/output error" in done.problem
        assert not quiet.shard.log_loop.failed.done()

    run(loop, main)


@pytest.mark.parametrize("which", [ALL, ALL._replace(by_ms=MINUTE_MS)])
def test_too_many_open_files_are_waited_for(
    loop: ManualLoop, which: Which, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS)
        await write_out(quiet)
        tries = 0

        def none_left(*_: object) -> None:
            nonlocal tries
            tries += 1
            raise DiskFull("open: too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(bodies.Files, "index_of", none_left)
            asked = asyncio.create_task(quiet.shard.bulk.change(ID, which, 600.0))
            counted = asyncio.create_task(quiet.shard.bulk.count(which))
            await loop.silence(2)
            assert tries > 2
            assert not asked.done()
            assert not counted.done()
        done = await asked
        assert done is not None
        assert (done.count, done.problem) == (1, "")
        assert await counted in {0, 1}  # before the job was through, or behind it

    run(loop, main)


def test_of_two_cancels_that_come_at_once_one_passes(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job can stand behind: another one would be forgotten, and shift all anew if repeated."""
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS)
        quiet.world.fill_disk(Limits().free_bytes_min - 1)
        change = quiet.shard.bulk.change
        waits = asyncio.create_task(change(ID, SHIFT, 600.0))
        await loop.silence(5)
        cancels = [(b"%d" % n * 16, ALL._replace(topic=f"other{n}")) for n in (1, 2)]
        passed, not_yet = await asyncio.gather(*(change(*each, 2.0) for each in cancels))
        assert passed is not None
        assert passed.over_ms
        assert not_yet is None
        asked_again = await change(*cancels[1], 2.0)
        assert asked_again is not None
        assert asked_again.over_ms
        quiet.world.free_disk()
        done = await waits
        assert done is not None
        assert (done.count, bool(done.over_ms)) == (1, True)

    run(loop, main)


class NoTopics:
    """Links of a shard whose brokers serve nothing any more."""

    routes_known, lost_brokers, live = True, (), ()

    def check_may_serve(self) -> None: ...

    def queues_of(self, topic: str) -> tuple[()]:
        return ()

    async def queues_soon(self, topic: str, timeout_s: float) -> tuple[()]:
        return ()


def test_who_asks_again_about_a_move_is_answered_though_its_topic_is_gone(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_loop, "ThreadPoolExecutor", AtOnce)

    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS)
        request = ChangePendingRequest(request_id=ID, topic="any", to_topic="keyed")
        assert await quiet.shard.bulk.change(ID, which_of(request), 600.0)
        requests = BulkRequests(quiet.shard, cast(BrokerLinks, NoTopics()))
        answer = await requests.change(request)
        assert (answer.count, answer.over) == (1, True)
        for new in (b"n" * 16, b""):
            request.request_id, request.dry_run = new, not new
            with pytest.raises(TopicNotFound):
                await requests.change(request)

    run(loop, main)
