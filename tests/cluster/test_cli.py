"""The command line's contract: fields, order, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from duemq.cli.exits import Exit
from duemq.embedded import EmbeddedCluster
from tests.cluster.harness import WAIT_S, duemq, rows, topic_name

SENT = {"message_id", "topic", "broker", "queue", "offset"}
DELAYED = {"message_id", "topic", "handle", "due_ms"}
RECEIVED = {
    "message_id",
    "topic",
    "broker",
    "queue",
    "offset",
    "key",
    "tag",
    "body",
    "attempt",
    "born_ms",
    "store_ms",
    "due_ms",
    "properties",
}


@pytest.fixture
def nameserver(cluster: EmbeddedCluster) -> str:
    return cluster.nameserver


def received(nameserver: str, topic: str, count: int, *more: str) -> list[dict[str, object]]:
    arguments = ("--from", "earliest", "--count", str(count), "--idle-timeout", "20", "--json")
    return rows(duemq(nameserver, "consume", topic, "--group", topic, *arguments, *more))


def test_a_message_goes_out_and_comes_back_with_every_field(nameserver: str) -> None:
    topic = topic_name()
    options = ("--key", "k", "--tag", "en", "--property", "a=b", "--ordering-key", "o")
    (sent,) = rows(duemq(nameserver, "send", topic, "grüezi", *options, "--json"))
    assert set(sent) == SENT
    (message,) = received(nameserver, topic, 1)
    assert set(message) == RECEIVED
    assert {name: message[name] for name in SENT} == sent
    assert (message["key"], message["tag"], message["body"]) == ("k", "en", "grüezi")
    assert message["properties"] == {"a": "b"}
    assert (message["attempt"], message["due_ms"]) == (0, None)


def test_lines_are_answered_in_their_order(nameserver: str) -> None:
    topic = topic_name()
    lines = [f"line {number}" for number in range(200)]
    sent = rows(duemq(nameserver, "send", topic, "-", "--json", stdin="\n".join(lines) + "\n"))
    by_id = {m["message_id"]: m["body"] for m in received(nameserver, topic, len(lines))}
    assert [by_id[row["message_id"]] for row in sent] == lines


def test_a_csv_goes_out_as_objects_with_columns_as_options(nameserver: str, tmp_path: Path) -> None:
    topic, file = topic_name(), tmp_path / "orders.csv"
    file.write_text("id,customer,note\n1,ada,x\n2,bob,\n")
    columns = ("--key-column", "id", "--ordering-key-column", "customer", "--tag-column", "note")
    rows(duemq(nameserver, "send", topic, "--file", str(file), *columns, "--json"))
    messages = {m["key"]: m for m in received(nameserver, topic, 2)}
    assert json.loads(str(messages["1"]["body"])) == {"id": "1", "customer": "ada", "note": "x"}
    assert (messages["1"]["tag"], messages["2"]["tag"]) == ("x", None)


def test_what_cannot_be_sent_is_an_error_in_its_place(nameserver: str, tmp_path: Path) -> None:
    topic, file = topic_name(), tmp_path / "orders.jsonl"
    file.write_text('{"n": 1}\nnot json\n{"n": 3}\n')
    done = duemq(nameserver, "send", topic, "--file", str(file), "--json")
    assert done.returncode == Exit.USAGE
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["error" in row for row in printed] == [False, True, False]
    assert printed[1]["line"] == 2


@pytest.mark.parametrize(
    "option", [("--delay", "1s"), ("--delay-level", "1"), ("--at", "2001-01-01T00:00:00Z")]
)
def test_a_delayed_message_has_a_handle_and_a_due_time(
    nameserver: str, option: tuple[str, str]
) -> None:
    topic = topic_name()
    (sent,) = rows(duemq(nameserver, "send", topic, "later", *option, "--json"))
    assert set(sent) == DELAYED
    (message,) = received(nameserver, topic, 1)
    assert message["due_ms"] == sent["due_ms"]
    assert int(str(message["store_ms"])) >= sent["due_ms"]
    assert time.time() * 1000 >= sent["due_ms"]


@pytest.mark.parametrize(
    ("option", "field"),
    [
        (("--delay", "-5s"), "delay"),
        (("--delay", "soon"), "delay"),
        (("--at", "tomorrow"), "deliver_at"),
        (("--at", "2030-01-01T00:00:00"), "deliver_at"),
        (("--delay-level", "99"), "delay_level"),
        (("--delay-level", "0"), "delay_level"),
    ],
)
def test_an_illegal_due_time_is_refused_by_name(
    nameserver: str, option: tuple[str, str], field: str
) -> None:
    done = duemq(nameserver, "send", topic_name(), "x", *option, "--json")
    assert done.returncode == Exit.USAGE
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["error"]["field"].startswith(field)


def test_cancel_answers_cancelled_fired_and_unknown(nameserver: str) -> None:
    topic = topic_name()
    (far,) = rows(duemq(nameserver, "send", topic, "x", "--delay", "1h", "--json"))
    (near,) = rows(duemq(nameserver, "send", topic, "y", "--delay", "0s", "--json"))
    received(nameserver, topic, 1)
    for _ in range(2):
        (answer,) = rows(duemq(nameserver, "timer", "cancel", far["handle"], "--json"))
        assert answer == {"handle": far["handle"], "outcome": "cancelled"}
    done = duemq(nameserver, "timer", "cancel", near["handle"], "--json")
    assert done.returncode == Exit.FAILED
    assert json.loads(done.stdout)["outcome"] == "fired"


def test_a_malformed_handle_is_refused(nameserver: str) -> None:
    done = duemq(nameserver, "timer", "cancel", "nonsense", "--json")
    assert done.returncode == Exit.USAGE
    assert "handle" in json.loads(done.stdout)["error"]["message"]


def test_topics_are_made_listed_shown_and_deleted(nameserver: str) -> None:
    topic = topic_name()
    rows(duemq(nameserver, "topic", "create", topic, "--queues", "3", "--json"))
    assert topic in {row["topic"] for row in rows(duemq(nameserver, "topic", "list", "--json"))}
    shown = rows(duemq(nameserver, "topic", "show", topic, "--json"))
    assert {(row["broker"], row["queue"]) for row in shown} == {
        (broker, queue) for broker in ("broker-0", "broker-1") for queue in range(3)
    }
    rows(duemq(nameserver, "topic", "delete", topic, "--json"))
    assert duemq(nameserver, "topic", "show", topic).returncode == Exit.NOT_FOUND
    assert duemq(nameserver, "topic", "delete", topic).returncode == Exit.NOT_FOUND


def test_groups_are_listed_and_shown_with_their_lag(nameserver: str) -> None:
    topic = topic_name()
    rows(duemq(nameserver, "send", topic, "-", "--json", stdin="a\nb\nc\n"))
    received(nameserver, topic, 2)
    assert topic in {row["group"] for row in rows(duemq(nameserver, "group", "list", "--json"))}
    shown = rows(duemq(nameserver, "group", "show", topic, "--json"))
    assert {row["topic"] for row in shown} == {topic}
    assert sum(row["lag"] for row in shown if row["lag"] is not None) <= 1
    assert duemq(nameserver, "group", "show", "no-such-group").returncode == Exit.NOT_FOUND


def test_the_cluster_shows_its_members(nameserver: str) -> None:
    members = rows(duemq(nameserver, "cluster", "show", "--json"))
    assert {row["name"] for row in members} >= {"broker-0", "broker-1", "timer-0"}


def test_a_body_that_is_not_text_is_base64(nameserver: str, cluster: EmbeddedCluster) -> None:
    from duemq import Producer

    topic = topic_name()
    with Producer(nameserver) as producer:
        producer.send(topic, b"\xff\x00")
    (message,) = received(nameserver, topic, 1)
    assert (message["body"], message["body_base64"]) == (None, "/wA=")


def test_a_tag_filter_selects(nameserver: str) -> None:
    topic = topic_name()
    for tag in ("en", "de", "fr"):
        rows(duemq(nameserver, "send", topic, tag, "--tag", tag, "--json"))
    bodies = {m["body"] for m in received(nameserver, topic, 2, "--tag", "en || fr")}
    assert bodies == {"en", "fr"}


def test_count_commits_exactly_what_was_printed(nameserver: str) -> None:
    topic = topic_name()
    rows(duemq(nameserver, "topic", "create", topic, "--queues", "1", "--json"))
    lines = "".join(f"{number}\n" for number in range(50))
    rows(duemq(nameserver, "send", topic, "-", "--ordering-key", "o", "--json", stdin=lines))
    seen = [m["body"] for _ in range(5) for m in received(nameserver, topic, 10)]
    assert seen == [str(number) for number in range(50)]


def test_a_line_is_answered_before_the_next_is_written(nameserver: str) -> None:
    command = [sys.executable, "-m", "duemq.cli", "send", topic_name(), "-", "--json"]
    with subprocess.Popen(
        [*command, "--nameserver", nameserver],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in ("one\n", "two\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert set(json.loads(process.stdout.readline())) == SENT
    assert process.returncode == 0


def test_a_reader_that_leaves_ends_the_command_quietly(nameserver: str) -> None:
    topic = topic_name()
    lines = "".join(f"{number}\n" for number in range(20))
    rows(duemq(nameserver, "send", topic, "-", "--json", stdin=lines))
    command = [sys.executable, "-m", "duemq.cli", "consume", topic, "--group", topic]
    with subprocess.Popen(
        [*command, "--from", "earliest", "--json", "--nameserver", nameserver],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        rows(duemq(nameserver, "send", topic, "-", "--json", stdin=lines))
        assert process.wait(WAIT_S) == Exit.FAILED
        assert process.stderr.read() == ""
