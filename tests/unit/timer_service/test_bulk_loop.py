"""Jobs on what is pending, between other work: while there is no room."""

import asyncio

import pytest

from duemq_server.timer_service import bulk_loop
from duemq_server.timer_service.scheduling.bulk.jobs import Which
from duemq_server.timer_service.timers.limits import Limits
from tests.manual_loop import AtOnce, ManualLoop
from tests.unit.timer_service.test_shard import MINUTE_MS, Quiet, loop, run

__all__ = ["loop"]

ALL = Which("any", "", 0, 1 << 60, None)
ID = b"j" * 16


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
