"""What is printed, for people and for programs; and the exit code of each error."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import click
import pytest

from duemq import errors
from duemq.errors import MissingBroker
from duemq.protocol.due import DUE_MS_MAX
from duemq_cli.app import cli
from duemq_cli.exits import Exit, exit_of
from duemq_cli.output import Output, error_fields, in_words_of
from duemq_cli.text import age, duration, exact_duration, local_time, shown

ROWS = [{"name": "a", "count": 1_000}, {"name": "b", "count": None}]


def test_a_table_is_an_object_a_line_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    Output(True).table(("name", "count"), ROWS, empty="nothing")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ROWS


def test_a_table_has_columns_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    Output(False).table(("name", "count"), ROWS, empty="nothing")
    printed = capsys.readouterr().out
    assert "name" in printed
    assert "1000" in printed


def test_an_empty_table_says_so_to_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    Output(False).table(("name",), [], empty="no topics")
    Output(True).table(("name",), [], empty="no topics")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no topics\n")


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.TooLarge("body is\n5 bytes", field="body", value=5, limit=4)
    Output(False).error(error)
    Output(True).error(error)
    captured = capsys.readouterr()
    assert captured.err == "duemq: body is 5 bytes\n"
    assert json.loads(captured.out)["error"] == {
        "code": "TOO_LARGE",
        "message": "body is\n5 bytes",
        "field": "body",
        "value": "5",
        "limit": "4",
    }


def test_an_error_that_is_not_ours_has_a_code_too() -> None:
    assert error_fields(OSError("disk on fire")) == {"code": "FAILED", "message": "disk on fire"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgument, Exit.USAGE),
        (errors.TooLarge, Exit.USAGE),
        (errors.TopicNotFound, Exit.NOT_FOUND),
        (errors.GroupNotFound, Exit.NOT_FOUND),
        (errors.NotReady, Exit.UNAVAILABLE),
        (errors.Timeout, Exit.UNAVAILABLE),
        (errors.TopicExists, Exit.FAILED),
        (errors.Corrupt, Exit.FAILED),
    ],
)
def test_the_exit_code_tells_what_kind_of_error(error: type[errors.DuemqError], code: Exit) -> None:
    assert exit_of(error("x")) is code


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), ("", "-"), (1234, "1234"), (1.25, "1.2"), (True, "True")]
)
def test_cells_are_for_people(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_missing_broker_is_told_to_both(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [MissingBroker("b1", "connection refused")]
    Output(False).missing(missing)
    Output(True).missing(missing)
    captured = capsys.readouterr()
    assert captured.err == "duemq: incomplete, no answer of b1: connection refused\n"
    assert json.loads(captured.out) == {
        "missing_brokers": [{"broker": "b1", "error": "connection refused"}]
    }


def test_a_partial_answer_names_the_brokers_and_has_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = [MissingBroker("b1", "connection refused")]
    known = errors.PartialAnswer("no answer of b1", missing=missing, partial=[])
    worthless = errors.PartialAnswer("no answer of b1; nothing was changed", missing=missing)
    for error in (known, worthless):
        Output(False).error(error)
    assert [exit_of(known), exit_of(worthless)] == [Exit.PARTIAL, Exit.UNAVAILABLE]
    assert capsys.readouterr().err == (
        "duemq: incomplete, no answer of b1: connection refused\n"
        "duemq: no answer of b1; nothing was changed\n"
    )


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (59_999, "59 s"),
        (599_000, "599 s"),
        (600_000, "10 m"),
        (36_000_000, "10 h"),
        (864_000_000, "10 d"),
    ],
)
def test_lengths_of_time(ms: int, text: str) -> None:
    assert duration(ms) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0ms"), (250, "250ms"), (1_500, "1500ms"), (90_000, "90s"), (7_200_000, "2h")],
)
def test_lengths_of_time_as_they_are_written(ms: int, text: str) -> None:
    assert exact_duration(ms) == text


@pytest.mark.parametrize("columns", ["20", "80", None])
def test_a_table_breaks_no_cell_however_narrow_the_terminal(
    columns: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    row = {name: name * 30 for name in ("a", "b", "c")} | {"time": "2030-01-31 09:00:00.000+00:00"}
    Output(False).table(tuple(row), [row], empty="")
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "aaa" in each]
    assert line.split("  ") == list(row.values())


def test_cells_stand_below_their_columns_also_when_characters_are_wide(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Output(False).table(
        ("name", "n"), [{"name": "東京", "n": 1}, {"name": "[b]:smile:", "n": 2}], empty=""
    )
    *_, wide, plain = capsys.readouterr().out.splitlines()
    assert wide == "東京" + " " * 8 + "1"
    assert plain == "[b]:smile:  2"


def test_what_others_wrote_cannot_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2Jb\rc\nd\x9b\u202e\x07\tü"
    Output(False).table(("key",), [{"key": evil}], empty="")
    Output(False).error(errors.Internal(evil))
    Output(False).line(evil)
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert printed.isprintable() or set(printed) - {"\n"} == {
        each for each in printed if each.isprintable()
    }
    assert "a\\x1b[2Jb\\rc\\nd\\x9b\\u202e\\x07\\tü" in captured.out


def test_a_table_in_a_pipe_cuts_nothing_off(capsys: pytest.CaptureFixture[str]) -> None:
    row = {name: name * 30 for name in ("a", "b", "c", "d", "e")}
    Output(False).table(tuple(row), [row], empty="")
    printed = capsys.readouterr().out
    assert all(value in printed for value in row.values())


@pytest.mark.parametrize("epoch_ms", [253402300799999, 1_795_508_318_967, 1_001, 999])
def test_a_time_is_shown_to_the_millisecond(epoch_ms: int) -> None:
    shown_ms = datetime.fromisoformat(local_time(epoch_ms)) - datetime(1970, 1, 1, tzinfo=UTC)
    assert shown_ms == timedelta(milliseconds=epoch_ms)


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_tokyo")
def test_the_last_time_that_may_be_due_is_shown_where_the_year_10000_has_begun() -> None:
    assert local_time(DUE_MS_MAX) == "9999-12-31 23:59:59.999+00:00"
    assert local_time(1_000) == "1970-01-01 09:00:01.000+09:00"


@pytest.mark.parametrize(
    ("ms", "text"), [(None, None), (0, None), (-1, "unreadable"), (90_000, "90 s")]
)
def test_an_age_is_none_where_nothing_waits(ms: int | None, text: str | None) -> None:
    assert age(ms) == text


@pytest.mark.parametrize(
    ("command", "message", "told"),
    [
        ("schedule add", "every_ms: 1 is not allowed", "--every: 1 is not allowed"),
        (
            "schedule add",
            "until_ms: 2 is not allowed: from_ms (3) or later",
            "--until: 2 is not allowed: --from (3) or later",
        ),
        ("schedule add", "cron: 'x' is not allowed: it", "--cron: 'x' is not allowed: it"),
        ("schedule add", "name: 'a b' is not allowed", "name: 'a b' is not allowed"),
        ("message find", "message_id: '' is not allowed", "--id: '' is not allowed"),
        ("message find", "topic: 'since_ms' is no topic", "topic: 'since_ms' is no topic"),
        ("timer move", "to_topic: 't' is not allowed", "--to-topic: 't' is not allowed"),
        ("group create", "retry_delays: '' is not allowed", "--delays: '' is not allowed"),
        ("timer cancel", "timer_key: '' is not allowed", "--timer-key: '' is not allowed"),
        ("timer cancel", "what the key waits for", "what the key waits for"),
    ],
)
def test_a_wrong_value_is_told_by_the_option_that_has_it(
    command: str, message: str, told: str
) -> None:
    """The words of the request are programs': an error's `field` stays as it is."""
    group, name = command.split()
    called = cli.get_command(click.Context(cli), group)
    assert isinstance(called, click.Group)
    error = errors.InvalidArgument(message, field="f", value="v", limit="l")
    found = in_words_of(called.commands[name], error)
    assert (str(found), found.field, found.value, found.limit) == (told, "f", "v", "l")


def test_other_errors_are_told_as_they_are() -> None:
    error = errors.Unavailable("topic: away", field="topic")
    assert in_words_of(cli, error) is error
    wrong = errors.InvalidArgument("topic: none", field="topic")
    assert in_words_of(None, wrong) is wrong


@pytest.mark.parametrize("rows", [[], ROWS])
@pytest.mark.parametrize("as_json", [True, False])
def test_where_somebody_is_missing_it_is_not_said_that_there_is_nothing(
    capsys: pytest.CaptureFixture[str], rows: list[dict[str, object]], as_json: bool
) -> None:
    away = [MissingBroker("b1", "it is away")]
    Output(as_json).table(("name",), rows, empty="no topics", missing=away)
    printed = capsys.readouterr()
    told = printed.out if as_json else printed.err
    assert "it is away" in told.splitlines()[-1]
    assert "no topics" not in printed.out + printed.err


@pytest.mark.parametrize("as_json", [True, False])
def test_programs_too_hear_that_a_limit_left_something_out(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    Output(as_json).say_if_more(False, 64)
    Output(as_json).say_if_more(True, 64)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "there are more than 64: raise --limit, or choose\n"
