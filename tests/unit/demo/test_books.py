"""The services' own books against the demo's, and the rules of changes: every fault is named."""

import pytest

from duemq.descriptions import TimerCount
from duemq_server.demo.books import Reminder, Stop, check_counts, check_reminders
from duemq_server.demo.ledger import Delivery, Ledger, LoggedMessage

RIGHT = {"pending": 0, "accepted": 13, "fired": 8, "cancelled": 2, "replaced": 3}


def told(**changed: int) -> str:
    count = TimerCount("departures", **{**RIGHT, **changed})
    return "\n".join(check_counts(count, flights=10, changed=3, flew=8))


def test_books_that_agree() -> None:
    assert told() == ""
    assert list(check_counts(None, 10, 3, 8)) == []


@pytest.mark.parametrize("name", ["pending", "accepted", "fired", "replaced"])
def test_books_that_differ(name: str) -> None:
    found = told(**{name: RIGHT[name] + 1})
    assert f"the timer service says {name} {RIGHT[name] + 1}, the demo {RIGHT[name]}" in found
    assert "do not balance" in found


def test_who_dropped_a_flight_is_found() -> None:
    assert "the timer service says fired 7, the demo 8" in told(fired=7, dropped=1)


def test_a_reminder_each_period() -> None:
    assert list(check_reminders([Reminder(10, 11), Reminder(5, 5), Reminder(15, 99)], 5)) == []


@pytest.mark.parametrize(
    ("reminders", "problem"),
    [
        ([], "no reminder came"),
        ([Reminder(5, 5), Reminder(15, 15)], "reminders missing: 1"),
        ([Reminder(5, 5), Reminder(5, 6)], "reminders twice: 1"),
        ([Reminder(5, 4)], "reminders early: 1"),
    ],
)
def test_a_fault_of_the_reminders_is_named(reminders: list[Reminder], problem: str) -> None:
    assert list(check_reminders(reminders, 5)) == [problem]


def changed(at_ms: int, gate: str | None = "G2") -> Ledger:
    """A flight that was moved to 300 and got a second gate, stored at `at_ms`."""
    ledger = Ledger(deliveries={"board": [Delivery("UA1", at_ms)]})
    ledger.accept("UA1", 100)
    ledger.change_gate("UA1", 100, "G1")
    ledger.move("UA1", 300)
    ledger.change_gate("UA1", 300, "G2")
    ledger.stored.append(LoggedMessage("UA1", at_ms, gate, "LGA"))
    return ledger


def problems(ledger: Ledger) -> list[str]:
    return list(ledger.audit(1, ["board"]).problems)


def test_a_flight_goes_by_its_newest_time_and_gate() -> None:
    assert problems(changed(301)) == []
    assert problems(changed(301, "G1")) == ["in the log with another gate than its newest: UA1"]
    assert problems(changed(150)) == [
        "stored before its due time: UA1",
        "early at group board: UA1",
    ]


def test_a_flight_that_was_held_has_its_own_lateness() -> None:
    ledger = changed(500)
    ledger.stops.append(Stop("LGA", 250, 490))
    audit = ledger.audit(1, ["board"])
    assert audit.problems == []
    assert audit.lateness_stopped["max_ms"] == 200
    assert audit.lateness_outside == audit.lateness_inside == {}


def test_a_flight_that_left_during_the_stop_is_named() -> None:
    ledger = changed(310)
    ledger.stops.append(Stop("LGA", 250, 490))
    assert problems(ledger) == ["left during the ground stop at LGA: UA1"]


@pytest.mark.parametrize("stop", [Stop("JFK", 250, 490), Stop("LGA", 305, 490)])
def test_a_stop_elsewhere_or_later_holds_nobody(stop: Stop) -> None:
    ledger = changed(310)
    ledger.stops.append(stop)
    assert problems(ledger) == []
