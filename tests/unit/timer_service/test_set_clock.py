"""What goes on in time though the clock is set."""

import pytest

from tests.manual_loop import ManualLoop
from tests.unit.timer_service.test_shard import MINUTE_MS, Quiet, loop, run

__all__ = ["loop"]


@pytest.mark.parametrize("by_ms", [60 * MINUTE_MS, -60 * MINUTE_MS])
def test_checkpoints_go_on_though_the_clock_is_set(loop: ManualLoop, by_ms: int) -> None:
    """A restart would have to read all of the log since."""

    async def main(quiet: Quiet) -> None:
        await quiet.take(24 * 60 * MINUTE_MS)
        await loop.silence(60)
        loop.set_clock(by_ms)
        await loop.silence(5)
        await quiet.take(24 * 60 * MINUTE_MS)
        end = quiet.world.directory.log.end_position
        await loop.silence(60)
        assert quiet.world.directory.housekeeper._saved_position >= end

    run(loop, main)
