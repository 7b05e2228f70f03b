from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.checker import Event
from tests.skew.tending_checker import faults

PLANNED: Event = {"event": "planned", "id": "s", "count": 3, "every_ms": 1_000}


def beat(at_ms: int, **fields: Any) -> Event:
    times = {"scheduled_ms": at_ms, "due_ms": at_ms, "store_ms": at_ms + 2}
    return {"event": "beat", "id": "s", **times, **fields}


KEPT = [PLANNED, beat(5_000), beat(7_000), beat(6_000)]


def test_a_schedule_that_kept_its_plan_has_no_fault() -> None:
    assert faults(KEPT) == []


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        (KEPT[:-1], "1 of 3 did not come"),
        ([*KEPT, beat(6_000)], "1 came twice"),
        ([*KEPT, beat(8_000)], "1 came that were not planned"),
        ([*KEPT[:-1], beat(6_500)], "1 came that were not planned"),
        ([*KEPT[:-1], beat(6_000, due_ms=6_100)], "1 were not due when they were to be"),
        ([*KEPT[:-1], beat(6_000, store_ms=5_999)], "1 came early"),
        ([{"event": "wrong", "id": "r", "error": "a job touched 2 of 3"}], "touched 2 of 3"),
    ],
)
def test_what_is_off_its_plan_is_named(events: list[Event], fault: str) -> None:
    assert any(fault in each for each in faults(events)), faults(events)


def test_what_was_stored_before_its_hold_was_to_end_is_early() -> None:
    """The second "acked" counts: `tending.py` writes it as it resumes."""
    events: list[Event] = [
        {"event": "sent", "id": "a"},
        {"event": "acked", "id": "a", "due_ms": 1_000},
        {"event": "acked", "id": "a", "due_ms": 5_000},
    ]
    place = {"broker": "b", "queue": 0, "offset": 0}
    assert faults([*events, {"event": "stored", "id": "a", "store_ms": 5_000, **place}]) == []
    [early] = faults([*events, {"event": "stored", "id": "a", "store_ms": 4_999, **place}])
    assert early.startswith("early")
