import pickle
from datetime import timedelta

import pytest

import duemq
from duemq.consumer.outcomes import (
    ERROR_CHARACTERS_MAX,
    DeadLetter,
    Outcome,
    RetryLater,
    outcome_of,
)
from duemq.errors import InvalidArgument


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("no such order"), Outcome("ValueError: no such order")),
        (KeyError(), Outcome("KeyError")),
        (RetryLater(2.5), Outcome("again in 2.5 s", delay_ms=2_500)),
        (RetryLater("1h30m", "closed"), Outcome("closed", delay_ms=5_400_000)),
        (RetryLater(timedelta(0)), Outcome("again in 0 s", delay_ms=0)),
        (DeadLetter("unreadable"), Outcome("unreadable", dead_letter=True)),
    ],
)
def test_what_an_exception_asks_for(error: Exception, outcome: Outcome) -> None:
    assert outcome_of(error) == outcome


@pytest.mark.parametrize("delay", [-1, "soon", float("nan"), None])
def test_a_delay_that_is_none_is_refused(delay: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        RetryLater(delay)  # type: ignore[arg-type]
    assert refused.value.field == "delay"


def test_a_long_reason_is_cut() -> None:
    assert len(outcome_of(ValueError("x" * 5_000)).error) == ERROR_CHARACTERS_MAX


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_any_text_can_travel() -> None:
    assert outcome_of(Unspeakable()).error == "Unspeakable"
    outcome_of(OSError("\udc80 is no text")).error.encode()


def test_they_travel_between_processes() -> None:
    later = pickle.loads(pickle.dumps(RetryLater("5m", "closed")))
    assert (later.delay_ms, later.reason) == (300_000, "closed")
    assert str(pickle.loads(pickle.dumps(DeadLetter("unreadable")))) == "unreadable"


def test_both_faces_export_them() -> None:
    for face in (duemq, duemq.aio):
        assert face.RetryLater is RetryLater
        assert face.DeadLetter is DeadLetter
