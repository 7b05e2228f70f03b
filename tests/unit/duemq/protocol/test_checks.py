"""What is checked, and that an error says it all: the field, the value, and what is allowed."""

import re
from collections.abc import Callable

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol import checks

WORD = re.compile(r"[a-z]+")


@pytest.mark.parametrize(
    "check",
    [
        lambda: checks.between("queues", 1, 1, 4),
        lambda: checks.between("queues", 4, 1, 4),
        lambda: checks.between("queues", 0, 1, 4, zero="the default"),
        lambda: checks.at_least("offset", 0, 0),
        lambda: checks.at_most("in_flight", 64, 64),
        lambda: checks.above("timeout_s", 0.001, 0),
        lambda: checks.whole("threads", 1, 1, 1_024),
        lambda: checks.number("wait_s", 0, 0, 30),
        lambda: checks.number("wait_s", 29.9, 0, 30),
        lambda: checks.count("handles", 10, 0, 10),
        lambda: checks.length("client", "", 0, 3),
        lambda: checks.filled("group", "a"),
        lambda: checks.matches("name", "abc", WORD, "letters"),
        lambda: checks.one_of("mode", "sync", ("sync", "async")),
        lambda: checks.at_most_one(key=None, message_id="a"),
        lambda: checks.at_most_one(key=None, message_id=None),
    ],
)
def test_what_is_allowed_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: checks.between("queues", 5, 1, 4), "queues: 5 is not allowed: 1 to 4"),
        (lambda: checks.between("queues", 0, 1, 4), "queues: 0 is not allowed: 1 to 4"),
        (
            lambda: checks.between("queues", 5, 1, 4, zero="the default"),
            "queues: 5 is not allowed: 1 to 4, or 0 for the default",
        ),
        (lambda: checks.between("wait", float("nan"), 1, 4), "wait: nan is not allowed: 1 to 4"),
        (lambda: checks.at_least("at_ms", -1, 0), "at_ms: -1 is not allowed: at least 0"),
        (lambda: checks.at_most("in_flight", 65, 64), "in_flight: 65 is not allowed: at most 64"),
        (lambda: checks.above("wait_s", 0, 0), "wait_s: 0 is not allowed: above 0"),
        (
            lambda: checks.whole("threads", True, 1, 1_024),
            "threads: True is not allowed: a whole number, 1 to 1,024",
        ),
        (
            lambda: checks.whole("threads", 1.0, 1, 1_024),
            "threads: 1.0 is not allowed: a whole number, 1 to 1,024",
        ),
        (lambda: checks.number("wait_s", "1", 0, 30), "wait_s: '1' is not allowed: 0 to 30"),
        (lambda: checks.number("wait_s", True, 0, 30), "wait_s: True is not allowed: 0 to 30"),
        (
            lambda: checks.count("handles", 11, 0, 10, "in a request"),
            "handles: 11 in a request, at most 10 are allowed",
        ),
        (lambda: checks.count("queues", 0, 1, 10), "queues: 0 of them, 1 to 10 are allowed"),
        (
            lambda: checks.length("client", "abcd", 0, 3),
            "client: 4 characters, at most 3 are allowed",
        ),
        (lambda: checks.filled("group", ""), "group: '' is not allowed: text that is not empty"),
        (
            lambda: checks.filled("group", None),
            "group: None is not allowed: text that is not empty",
        ),
        (
            lambda: checks.matches("name", "abc1", WORD, "letters"),
            "name: 'abc1' is not allowed: letters",
        ),
        (
            lambda: checks.matches("name", b"abc", WORD, "letters"),
            "name: b'abc' is not allowed: letters",
        ),
        (
            lambda: checks.one_of("mode", "fast", ("sync", "async")),
            "mode: 'fast' is not allowed: one of sync, async",
        ),
        (
            lambda: checks.at_most_one(message_id="a", key="b"),
            "message_id and key exclude each other",
        ),
    ],
)
def test_what_is_not_allowed_is_refused(check: Callable[[], None], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check()
    assert str(refused.value) == message
    error = refused.value
    assert error.field
    assert error.limit
    assert error.field in message


def test_a_long_value_is_cut() -> None:
    error = checks.wrong("topic", "x" * 10_000, "a name")
    assert (len(error.value), error.limit) == (checks.SHOWN_CHARACTERS_MAX, "a name")
    assert len(str(checks.wrong("topics", ["x" * 10_000], "names"))) < 300
