import logging

from duemq.consumer.delivery.failure_log import KINDS_MAX, TELL_EVERY_S, FailureLog, kind_of
from duemq.outcomes import DeadLetter, RetryLater


def raised(error: BaseException, depth: int = 0) -> BaseException:
    try:
        if depth:
            raise raised(error, depth - 1)
        raise error
    except BaseException as caught:
        return caught


def test_the_first_of_a_kind_is_told_and_then_one_a_minute() -> None:
    log = FailureLog()
    assert log.tell("a", 100.0) == 0
    assert [log.tell("a", 100.0 + second) for second in (0, 1, 59.9)] == [None] * 3
    assert log.tell("a", 160.0) == 3
    assert log.tell("a", 161.0) is None
    assert log.tell("a", 1_000.0) == 1
    assert log.tell("a", 2_000.0) == 0


def test_kinds_do_not_count_for_one_another() -> None:
    log = FailureLog()
    assert log.tell("a", 0.0) == 0
    assert log.tell("b", 1.0) == 0
    assert log.tell("a", 2.0) is None
    assert log.tell("b", 61.0) == 0
    assert log.tell("a", 61.0) == 1


def test_of_too_many_kinds_a_bounded_number_is_told() -> None:
    log = FailureLog()
    told = [log.tell(number, float(number) / 1_000) for number in range(10 * KINDS_MAX)]
    assert [number for number, each in enumerate(told) if each is not None] == list(
        range(KINDS_MAX)
    )
    assert log.tell("later", TELL_EVERY_S) == 0  # in the place of the oldest
    assert log.tell("too early", TELL_EVERY_S) is None
    assert log.tell(0, TELL_EVERY_S) is None  # has lost its place
    assert log.tell(KINDS_MAX - 1, TELL_EVERY_S + 1) == 0


def test_a_kind_is_a_type_and_a_way_to_a_place() -> None:
    def other_place() -> BaseException:
        try:
            raise ValueError("a")
        except ValueError as error:
            return error

    kinds = [
        kind_of(raised(ValueError("a"))),
        kind_of(raised(KeyError("a"))),
        kind_of(other_place()),
        kind_of(raised(ValueError("a"), depth=1)),
        kind_of(ValueError("a")),  # was never raised
    ]
    assert len(set(kinds)) == len(kinds)
    assert kind_of(raised(ValueError("b"))) == kinds[0]


def test_recursion_does_not_make_kinds_without_end() -> None:
    assert kind_of(raised(ValueError("a"), depth=2)) == kind_of(raised(ValueError("a"), depth=50))


def test_one_error_raised_again_and_again_is_of_one_kind() -> None:
    error = ValueError("a")
    assert len({kind_of(raised(error)) for _ in range(5)}) == 1


def test_an_error_about_another_is_where_that_one_was() -> None:
    about = ValueError("b")
    about.__cause__ = cause = raised(KeyError("a"))
    assert kind_of(about)[2] == kind_of(cause)[2] != ()


def test_what_a_line_says() -> None:
    log, error = FailureLog(), raised(ValueError("a"))
    assert log.line(error, 0.0) == (logging.WARNING, error, "")
    assert log.line(error, 1.0) == (logging.DEBUG, None, "")
    assert log.line(error, 60.0) == (
        logging.WARNING,
        error,
        " (1 more like it since the last one here)",
    )


def test_what_the_callback_asks_for_is_no_alarm() -> None:
    log = FailureLog()
    for error in (raised(RetryLater("5m")), raised(DeadLetter("unreadable"))):
        assert log.line(error, 0.0) == (logging.INFO, None, "")
        assert log.line(error, 1.0) == (logging.DEBUG, None, "")
