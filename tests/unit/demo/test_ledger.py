"""The demo's books: they balance for a clean run and name every planted fault."""

import pytest

from duemq_server.demo.ledger import Delivery, Ledger, LoggedMessage, Outage

GROUPS = ("gates", "board")


def balanced() -> Ledger:
    """Two flights fly, one is cancelled."""
    ledger = Ledger(deliveries={group: [] for group in GROUPS})
    for flight, due_ms in (("UA1", 100), ("UA2", 200), ("UA3", 300)):
        ledger.accept(flight, due_ms)
    ledger.cancel("UA3")
    for flight, at_ms in (("UA1", 101), ("UA2", 203)):
        ledger.stored.append(LoggedMessage(flight, at_ms))
        for group in GROUPS:
            ledger.deliveries[group].append(Delivery(flight, at_ms + 1))
    return ledger


def problems(ledger: Ledger) -> str:
    return "\n".join(ledger.audit(3, GROUPS).problems)


def test_a_clean_run_balances() -> None:
    audit = balanced().audit(3, GROUPS)
    assert audit.problems == []
    assert (audit.accepted, audit.cancelled, audit.stored) == (3, 1, 2)
    assert [(g.group, g.delivered, g.repeated) for g in audit.groups] == [
        ("gates", 2, 0),
        ("board", 2, 0),
    ]


def test_a_repeat_at_a_group_is_counted_not_a_problem() -> None:
    ledger = balanced()
    ledger.deliveries["gates"].append(Delivery("UA1", 150))
    audit = ledger.audit(3, GROUPS)
    assert audit.problems == []
    assert audit.groups[0].repeated == 1


def test_lateness_is_split_at_the_outage() -> None:
    ledger = balanced()
    ledger.outages.append(Outage(150, 250))  # UA1 came before it
    audit = ledger.audit(3, GROUPS)
    assert audit.lateness_outside["max_ms"] == 2
    assert audit.lateness_inside["max_ms"] == 4


def test_what_an_outage_held_up_belongs_to_it_though_all_serve_again() -> None:
    ledger = Ledger()
    ledger.deliveries["board"] = []
    for flight, due_ms, late_ms in (("A", 900, 1_300), ("B", 1_900, 400), ("C", 2_290, 20)):
        ledger.accept(flight, due_ms)
        ledger.deliveries["board"].append(Delivery(flight, due_ms + late_ms))
    ledger.accept("D", 2_400)
    ledger.deliveries["board"].append(Delivery("D", 2_403))
    ledger.outages.append(Outage(800, 1_500))  # A holds B up, and B, C

    audit = ledger.audit(4, ["board"])

    assert audit.lateness_inside["max_ms"] == 1_300
    assert audit.lateness_outside["max_ms"] == 3


def test_what_came_late_because_clients_had_yet_to_find_the_broker_belongs_to_the_outage() -> None:
    ledger = Ledger()
    ledger.deliveries["board"] = []
    for flight, due_ms, late_ms in (("A", 1_600, 450), ("B", 1_700, 4), ("C", 2_600, 101)):
        ledger.accept(flight, due_ms)
        ledger.deliveries["board"].append(Delivery(flight, due_ms + late_ms))
    ledger.outages.append(Outage(800, 1_500))  # C was due too late to be held up by it

    audit = ledger.audit(3, ["board"])

    assert audit.lateness_inside["max_ms"] == 450
    assert audit.lateness_outside["max_ms"] == 101


def test_a_dropped_delivery_is_a_loss() -> None:
    ledger = balanced()
    ledger.deliveries["board"].pop()
    assert problems(ledger) == "lost for group board: UA2"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (LoggedMessage("UA1", 500), "twice in the log: UA1"),
        (LoggedMessage("UA3", 500), "in the log although cancelled: UA3"),
        (LoggedMessage("XX9", 500), "in the log, never accepted: XX9"),
        (LoggedMessage("UA2", 199), "stored before its due time: UA2"),
    ],
)
def test_a_fault_in_the_log_is_named(entry: LoggedMessage, problem: str) -> None:
    ledger = balanced()
    ledger.stored.append(entry)
    assert problem in problems(ledger)


@pytest.mark.parametrize(
    ("delivery", "problem"),
    [
        (Delivery("UA3", 500), "delivered to gates although cancelled: UA3"),
        (Delivery("XX9", 500), "delivered to gates, never accepted: XX9"),
        (Delivery("UA2", 199), "early at group gates: UA2"),
    ],
)
def test_a_fault_at_a_group_is_named(delivery: Delivery, problem: str) -> None:
    ledger = balanced()
    ledger.deliveries["gates"].append(delivery)
    assert problem in problems(ledger)


def test_a_message_that_was_not_accepted_is_missed() -> None:
    assert "3 messages were accepted, 4 were to be sent" in "\n".join(
        balanced().audit(4, GROUPS).problems
    )


def test_a_long_list_is_cut() -> None:
    ledger = Ledger()
    for number in range(8):
        ledger.accept(f"UA{number}", 1)
    assert "UA0, UA1, UA2, UA3, UA4 and 3 more" in "\n".join(ledger.audit(8, ["g"]).problems)
