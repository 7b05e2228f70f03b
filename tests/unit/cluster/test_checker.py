"""The checker finds every planted fault, and none in a clean history."""

import pytest

from tests.cluster.checker import Event, dump, judge, load

DUE_MS = 1_000


def clean_history() -> list[Event]:
    """Three messages: plain, delayed, cancelled; one group."""
    return [
        {"event": "sent", "id": "a", "at_ms": 1, "key": "k"},
        {"event": "sent", "id": "b", "at_ms": 2, "key": "k"},
        {"event": "sent", "id": "c", "at_ms": 3},
        {"event": "acked", "id": "a", "at_ms": 4, "due_ms": 0, **place(0)},
        {"event": "acked", "id": "b", "at_ms": 4, "due_ms": DUE_MS},
        {"event": "acked", "id": "c", "at_ms": 4, "due_ms": DUE_MS},
        {"event": "cancelled", "id": "c", "outcome": "cancelled"},
        stored("a", 0, 5),
        stored("b", 1, DUE_MS + 7),
        received("a", 6),
        received("b", DUE_MS + 9),
    ]


def place(offset: int) -> Event:
    return {"broker": "broker-0", "queue": 0, "offset": offset}


def stored(id: str, offset: int, store_ms: int) -> Event:
    return {"event": "stored", "id": id, "store_ms": store_ms, **place(offset)}


def received(id: str, at_ms: int) -> Event:
    return {"event": "received", "id": id, "group": "g", "at_ms": at_ms}


def without(history: list[Event], event: str, id: str) -> list[Event]:
    return [e for e in history if (e["event"], e["id"]) != (event, id)]


def test_a_clean_history_has_no_faults() -> None:
    verdict = judge(clean_history(), ["g"])
    assert verdict.faults == []
    assert (verdict.acked, verdict.stored, verdict.late_max_ms) == (3, 2, 7)


def test_a_failed_send_may_be_stored_or_not() -> None:
    for store in (True, False):
        history = without(clean_history(), "acked", "a")
        history.append({"event": "failed", "id": "a", "at_ms": 9})
        if not store:
            history = without(without(history, "stored", "a"), "received", "a")
        assert judge(history, ["g"]).faults == []


def test_repeats_at_a_consumer_are_counted_and_allowed() -> None:
    verdict = judge([*clean_history(), received("a", 8)], ["g"])
    assert verdict.faults == []
    assert verdict.repeated == {"g": 1}


@pytest.mark.parametrize(
    ("history", "fault"),
    [
        (without(clean_history(), "stored", "a"), "acknowledged and not in the log"),
        (without(clean_history(), "received", "b"), "never received by g"),
        ([*clean_history(), stored("b", 2, DUE_MS + 8)], "more than once in the log"),
        ([*clean_history(), stored("c", 2, DUE_MS)], "cancelled and yet delivered"),
        ([*clean_history(), received("c", DUE_MS)], "cancelled and yet delivered"),
        ([*clean_history(), stored("x", 2, 5)], "in the log, never sent"),
        (
            [stored("a", 3, 5), *without(clean_history(), "stored", "a")],
            "not where its receipt says",
        ),
        (
            [*without(clean_history(), "stored", "b"), stored("b", 1, DUE_MS - 1)],
            "early",
        ),
        ([*clean_history(), received("b", DUE_MS - 1)], "early"),
        (
            [*without(clean_history(), "stored", "a"), stored("a", 2, 5)],
            "out of order",
        ),
        (
            [
                *without(clean_history(), "cancelled", "c"),
                {"event": "cancelled", "id": "c", "outcome": "fired"},
            ],
            "acknowledged and not in the log",
        ),
    ],
)
def test_each_planted_fault_is_found(history: list[Event], fault: str) -> None:
    assert any(found.startswith(fault) for found in judge(history, ["g"]).faults)


def test_a_history_survives_its_file(tmp_path) -> None:
    path = tmp_path / "history.jsonl"
    dump(clean_history(), path)
    assert load(path) == clean_history()
