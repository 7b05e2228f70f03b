"""Timer shards that are given queues while the others are asked."""

from types import SimpleNamespace

import pytest

from duemq.administering.schedules import Schedules
from duemq.administering.timers import Timers
from duemq.errors import MissingBroker, PartialAnswer
from duemq.protocol.route import TimerShard

NOTHING = SimpleNamespace(schedules=[], more=False, timers=[], token=b"")


class Growing(Schedules, Timers):
    """Of one shard, which answers; then there is another one."""

    def __init__(self):
        self.asked = False

    def _shards(self):
        return [TimerShard("timer-0", "ns:1", 0, 1)]

    async def _ask_or_miss(self, *_):
        self.asked = True
        return NOTHING

    async def _together(self, asked):
        return [await each for each in asked]

    async def _lost(self, alive):
        return [MissingBroker("timer shard 1", "it came")] if self.asked else []


async def test_lists_name_a_shard_that_came_while_the_others_were_asked():
    with pytest.raises(PartialAnswer, match="timer shard 1: it came"):
        await Growing().schedules()
    with pytest.raises(PartialAnswer, match="timer shard 1: it came"):
        [_ async for _ in Growing().list_timers("orders")]
