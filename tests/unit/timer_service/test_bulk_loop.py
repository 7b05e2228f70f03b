"""Jobs on what is pending, between other work: while there is no room."""

import asyncio

import pytest

from duemq_server.timer_service import bulk_loop
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
