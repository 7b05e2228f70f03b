import pickle
from datetime import timedelta

import pytest

import duemq
from duemq.errors import InvalidArgument
from duemq.message import Message, Origin
from duemq.outcomes import (
    BatchFailed,
    DeadLetter,
    Failed,
    Outcome,
    RetryLater,
    errors_of,
    failures_of,
    outcome_of,
)
from duemq.protocol.limits import ERROR_CHARACTERS_MAX
from duemq.v1.message_pb2 import Record

ORIGIN = Origin("orders", "b0", 0)
BATCH = [Message(Record(message_id=f"m{n}"), ORIGIN, n, 0) for n in range(4)]
ERROR = ValueError("no")
LATER = RetryLater("5m")


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


@pytest.mark.parametrize("delay", [-1, "soon", float("nan"), None, "367d", timedelta(days=400)])
def test_a_delay_that_is_none_is_refused(delay: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        RetryLater(delay)  # type: ignore[arg-type]
    assert refused.value.field == "delay"


class Busy(RetryLater):
    def __init__(self) -> None:
        """Says nothing to its base."""


class Unnamed(BatchFailed):
    def __init__(self) -> None:
        """As above."""


class Listed(BatchFailed):
    def __init__(self) -> None:
        """Says it in a way of its own."""
        self.failures = BATCH[1:2]  # type: ignore[assignment]


class Worded(BatchFailed):
    def __init__(self) -> None:
        """As above."""
        self.failures = {BATCH[1]: "it is busy"}  # type: ignore[dict-item]


def test_a_kind_of_the_application_s_own_need_not_say_all() -> None:
    assert outcome_of(Busy()) == Outcome("")
    for error in (Unnamed(), Listed(), Worded()):
        assert failures_of(error, BATCH) == [Failed(0, len(BATCH), error)]


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
    failed = pickle.loads(pickle.dumps(BatchFailed({BATCH[1]: later, BATCH[2]: ERROR})))
    assert list(map(repr, failures_of(failed, BATCH))) == [
        "Failed(index=1, count=1, error=RetryLater('closed'))",
        "Failed(index=2, count=1, error=ValueError('no'))",
    ]


def test_both_faces_export_them() -> None:
    for face in (duemq, duemq.aio):
        assert face.BatchFailed is BatchFailed
        assert face.RetryLater is RetryLater
        assert face.DeadLetter is DeadLetter


DEAD = DeadLetter("unreadable")
NAMED = BatchFailed({BATCH[1]: ERROR})


@pytest.mark.parametrize(
    ("leaves", "meant"),
    [
        ([DEAD], DEAD),
        ([DEAD, DeadLetter("as well")], DEAD),
        ([ExceptionGroup("inner", [DEAD]), DEAD], DEAD),
        ([LATER, RetryLater("1h")], LATER),
        ([DEAD, ERROR], None),
        ([DEAD, LATER], None),
        ([ERROR], None),
        ([NAMED, NAMED], None),
    ],
)
def test_a_group_of_one_kind_is_as_its_first(leaves, meant) -> None:
    group = ExceptionGroup("in a TaskGroup", leaves)
    assert failures_of(group, BATCH[:1]) == [Failed(0, 1, meant or group)]
    one = failures_of(BatchFailed({BATCH[2]: group}), BATCH)
    assert one == [Failed(2, 1, meant or group)]


@pytest.mark.parametrize("leaf", [DEAD, LATER])
def test_of_a_list_a_group_may_be_about_one_message(leaf) -> None:
    """A TaskGroup over all of them has cancelled the others: these are no dead letters."""
    group = ExceptionGroup("in a TaskGroup", [leaf])
    assert failures_of(group, BATCH) == [Failed(0, 4, group)]
    assert failures_of(leaf, BATCH) == [Failed(0, 4, leaf)]


def test_a_group_of_one_that_names_messages_is_as_that() -> None:
    group = ExceptionGroup("in a TaskGroup", [NAMED])
    assert failures_of(group, BATCH) == failures_of(NAMED, BATCH)


# --- of a batch -------------------------------------------------------------------------------


def test_any_other_exception_fails_the_batch_as_a_whole() -> None:
    assert failures_of(ERROR, BATCH) == [Failed(0, 4, ERROR)]
    assert errors_of(ERROR, BATCH) == dict.fromkeys(range(4), ERROR)


def test_only_what_is_named_failed_in_the_order_of_the_batch() -> None:
    named = BatchFailed({BATCH[3]: LATER, BATCH[1]: ERROR})
    assert failures_of(named, BATCH) == [Failed(1, 1, ERROR), Failed(3, 1, LATER)]
    assert errors_of(named, BATCH) == {1: ERROR, 3: LATER}


def test_where_nothing_is_named_nothing_failed() -> None:
    assert failures_of(BatchFailed({}), BATCH) == []


def test_what_is_no_message_of_the_batch_fails_all_of_it() -> None:
    stranger = Message(Record(message_id="m9"), ORIGIN, 9, 0)
    for named in (stranger, 0, "m0"):
        raised = BatchFailed({BATCH[0]: ERROR, named: ERROR})  # type: ignore[dict-item]
        [failed] = failures_of(raised, BATCH)
        assert (failed.index, failed.count) == (0, 4)
        assert isinstance(failed.error, InvalidArgument)
        assert (failed.error.field, failed.error.value) == ("failures", str(named))
        assert repr(named) in str(failed.error)
        assert failed.error.__cause__ is raised


@pytest.mark.parametrize(
    "failures",
    [
        {BATCH[0]: "no"},
        {BATCH[0]: ValueError},
        {BATCH[0]: BatchFailed({BATCH[0]: ERROR})},
        [BATCH[0]],
        None,
    ],
)
def test_what_names_no_exceptions_is_refused_where_it_is_raised(failures: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        BatchFailed(failures)  # type: ignore[arg-type]
    assert refused.value.field == "failures"
    assert "{message: exception}" in refused.value.limit


def test_it_says_how_many_failed_and_of_what() -> None:
    errors = [ERROR, LATER, ValueError("again")]
    failed = BatchFailed(dict(zip(BATCH, errors, strict=False)))
    assert repr(failed) == "BatchFailed('3 of a batch: ValueError, RetryLater')"


def test_what_it_names_cannot_be_changed_behind_it() -> None:
    failures = {BATCH[0]: ERROR}
    raised = BatchFailed(failures)
    failures.clear()
    assert failures_of(raised, BATCH) == [Failed(0, 1, ERROR)]
