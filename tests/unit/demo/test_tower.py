"""The tower right after an outage, when its routes may lack the timer shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from duemq import Admin, Producer
from duemq.errors import PartialAnswer
from duemq_server.demo.day import load_day
from duemq_server.demo.ledger import Ledger
from duemq_server.demo.tower import Tower, now_ms

HOUR_MS = 3_600_000


class _Admin:
    """Answers each question at the second time only."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*_: object, **__: object) -> Any:
            self.asked.append(name)
            if self.asked.count(name) == 1:
                raise PartialAnswer("no answer of timer shard 0")
            return [] if name == "count_timers" else SimpleNamespace(pending=3)

        return ask


@pytest.mark.parametrize("over", [False, True])
def test_a_ground_stop_waits_for_the_timer_service(over: bool) -> None:
    admin, said, ledger = _Admin(), [""], Ledger(deliveries={}, reminder_every_ms=5_000)
    tower = Tower(cast(Admin, admin), cast(Producer, None), ledger, said.append)
    begin_ms = now_ms() - (100 if over else 2) * HOUR_MS
    departures = load_day()
    due_ms = {each.flight: begin_ms for each in departures}
    due_ms[departures[0].flight] += 4 * HOUR_MS
    tower.open([], due_ms, 1.0)
    tower.step("12:00")
    assert admin.asked == ["hold_timers"]
    assert said == [""]
    assert not tower.done
    for _ in range(4):
        tower.step("12:01")
    assert said[1] == "12:01  ground stop at LGA, 3 flights are still to leave"
    assert bool(ledger.stops) is over
    if over:
        assert admin.asked == ["hold_timers"] * 2 + ["count_timers"] * 2 + [
            "resume_timers",
            "count_timers",
            "resume_timers",
        ]
        assert len(said) == 3
        assert tower.done
