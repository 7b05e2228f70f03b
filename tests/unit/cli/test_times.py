"""Times as options take them."""

from datetime import UTC, datetime

import click
import pytest

from duemq.errors import InvalidArgument
from duemq.protocol.due import deliver_at_ms
from duemq_cli import times

AT = click.Option(["--at"])


def due_time(text: str) -> times.Due | None:
    return times.due_time(click.Context(click.Command("send")), AT, text)


def test_a_time_as_text_is_never_taken_for_seconds() -> None:
    """1971 in milliseconds is a number that would be."""
    found = due_time("1971-01-01T00:00:00Z")
    assert found == datetime(1971, 1, 1, tzinfo=UTC)
    assert deliver_at_ms(found) == 31_536_000_000


def test_epoch_milliseconds_stay_a_number() -> None:
    assert due_time("1900000000000") == 1_900_000_000_000
    assert due_time("9999-12-31T23:59:59.999Z") is not None


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "tomorrow",
        "1971-01-01",
        "1969-12-31T23:59:59Z",
        "1900000000",
        "-1",
        "9" * 20,
        "20300131",
        "2030",
    ],
)
def test_what_is_no_time_is_said_in_the_command_lines_words(wrong: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--at .* is no time to deliver at") as raised:
        due_time(wrong)
    assert raised.value.field == "deliver_at"


def test_what_is_out_of_range_is_told_the_range() -> None:
    with pytest.raises(InvalidArgument, match=r"from 1970 to 9999$"):
        due_time("10000-01-01T00:00:00Z")
    context = click.Context(click.Command("timer"))
    with pytest.raises(InvalidArgument, match=r"from 1970 to 9999$"):
        times.moment()(context, AT, "-900000d")
    for check in (times.delay, times.shift):
        assert check(context, AT, "2932896d") == "2932896d"
        with pytest.raises(InvalidArgument, match=r"up to 2932896d"):
            check(context, AT, "2932897d")
