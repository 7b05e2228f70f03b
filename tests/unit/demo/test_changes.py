"""What changes during the demo's day: planned from the data file alone."""

from duemq_server.demo.changes import ANNOUNCED_S, LATE_MIN, by_hours, plan, timer_key
from duemq_server.demo.day import SPEED_DEFAULT, load_day, schedule

DAY = load_day()
DUE = schedule(DAY, 1_000_000, SPEED_DEFAULT)
CHANGES = plan(DAY, DUE, SPEED_DEFAULT)


def test_the_name_of_a_flight_begins_with_its_airport() -> None:
    assert timer_key(DAY[0]) == "EWR/US1431"
    assert len({timer_key(each) for each in DAY}) == len(DAY)


def test_who_left_hours_late_is_moved_by_as_much() -> None:
    moved = [change for change in CHANGES if change.gate is None]
    assert len(moved) == 27
    for change in moved:
        late_min = change.departure.late_min
        assert late_min >= LATE_MIN
        later_ms = round(late_min * 60_000 / SPEED_DEFAULT)
        assert change.due_ms == DUE[change.departure.flight] + later_ms


def test_the_day_grows_by_less_than_20_s() -> None:
    assert max(change.due_ms for change in CHANGES) < max(DUE.values()) + 20_000


def test_a_new_gate_keeps_the_time() -> None:
    gates = [change for change in CHANGES if change.gate is not None]
    assert len({change.gate for change in gates}) == len(gates) == 18
    assert all(change.due_ms == DUE[change.departure.flight] for change in gates)


def test_a_change_is_announced_ahead_and_never_of_a_cancelled_flight() -> None:
    assert sorted(CHANGES, key=lambda change: change.announced_ms) == CHANGES
    for change in CHANGES:
        assert not change.departure.cancelled
        assert change.announced_ms == DUE[change.departure.flight] - ANNOUNCED_S * 1000


def test_the_day_by_hours_leaves_empty_ones_out() -> None:
    found = by_hours([1_000, 1_000 + 59_999, 1_000 + 60_000, 1_000 + 200_000], 1_000, 60.0)
    assert [(each.from_ms, each.to_ms, each.pending) for each in found] == [
        (1_000, 61_000, 2),
        (61_000, 121_000, 1),
        (181_000, 241_000, 1),
    ]
