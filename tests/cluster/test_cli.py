"""The command line's contract: fields, order, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from duemq_cli.exits import Exit
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import WAIT_S, duemq, rows, topic_name, until

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
    arguments = ("--from", "earliest", "--count", str(count), "--idle-timeout", "50", "--json")
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
    assert (message["attempt"], message["due_ms"]) == (1, None)


def test_what_is_beyond_the_count_is_neither_committed_nor_sent_back(nameserver: str) -> None:
    topic = topic_name()
    lines = "".join(f"{number}\n" for number in range(100))
    rows(duemq(nameserver, "send", topic, "-", "--ordering-key", "k", "--json", stdin=lines))
    bodies = [message["body"] for message in received(nameserver, topic, 10)]
    bodies += [message["body"] for message in received(nameserver, topic, 90, "--order", "queue")]
    assert bodies == [str(number) for number in range(100)]


def test_a_group_may_begin_at_a_time_and_select_by_property(nameserver: str) -> None:
    topic = topic_name()
    rows(duemq(nameserver, "send", topic, "old", "--property", "price=12", "--json"))
    begin_ms = round(time.time() * 1000) + 1
    until(lambda: time.time() * 1000 > begin_ms)
    for body, price in (("cheap", 8), ("dear", 12)):
        rows(duemq(nameserver, "send", topic, body, "--property", f"price={price}", "--json"))
    more = ("--group", f"{topic}-sql", "--sql", "price > 10", "--from", str(begin_ms))
    (message,) = received(nameserver, topic, 1, *more)
    assert message["body"] == "dear"


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
    assert {"in_per_s", "last_store_ms"} <= set(shown[0])
    rows(duemq(nameserver, "topic", "delete", topic, "--json"))
    assert duemq(nameserver, "topic", "show", topic).returncode == Exit.NOT_FOUND
    assert duemq(nameserver, "topic", "delete", topic).returncode == Exit.NOT_FOUND


@pytest.mark.long
def test_groups_are_listed_and_shown_with_their_lag(nameserver: str) -> None:
    topic = topic_name()
    rows(duemq(nameserver, "send", topic, "-", "--json", stdin="a\nb\nc\n"))
    received(nameserver, topic, 2)
    assert topic in {row["group"] for row in rows(duemq(nameserver, "group", "list", "--json"))}
    group, *rest = rows(duemq(nameserver, "group", "show", topic, "--json"))
    assert (group["kind"], group["group"], group["retries_max"]) == ("group", topic, 16)
    queues = [row for row in rest if row["kind"] == "queue" and "%" not in row["topic"]]
    assert {row["topic"] for row in queues} == {topic}
    assert sum(row["lag"] for row in queues) <= 1
    assert duemq(nameserver, "group", "show", "no-such-group").returncode == Exit.NOT_FOUND


def sent(nameserver: str, topic: str, *options: str) -> list[dict[str, object]]:
    lines = "a\nb\nc\nd\n"
    return rows(duemq(nameserver, "send", topic, "-", *options, "--json", stdin=lines))


def offset_of(nameserver: str, group: str, topic: str) -> int:
    shown = rows(duemq(nameserver, "group", "show", group, "--json"))
    return sum(row["offset"] for row in shown if row["kind"] == "queue" and row["topic"] == topic)


@pytest.mark.long
def test_a_group_is_reset_skipped_and_cloned(nameserver: str) -> None:
    topic = topic_name()
    sent(nameserver, topic)
    received(nameserver, topic, 4)
    assert offset_of(nameserver, topic, topic) == 4
    move = ("group", "reset", topic, "--topic", topic)
    planned = rows(duemq(nameserver, *move, "--to", "earliest", "--dry-run", "--json"))
    assert sum(row["before"] - row["after"] for row in planned) == 4
    assert all(row["dry_run"] for row in planned)
    assert offset_of(nameserver, topic, topic) == 4
    people = duemq(nameserver, *move, "--to", "earliest", "--dry-run")
    assert people.returncode == 0
    assert "before" in people.stdout
    done = rows(duemq(nameserver, *move, "--to", "-1h", "--json"))
    assert {row["dry_run"] for row in done} == {False}
    assert offset_of(nameserver, topic, topic) == 0
    # Nobody is there to answer: it is not asked.
    assert duemq(nameserver, "group", "skip", topic, "--topic", topic).returncode == 0
    assert offset_of(nameserver, topic, topic) == 4
    place = f"{done[0]['broker']}/{done[0]['queue']}"
    [one] = rows(duemq(nameserver, *move, "--to", "earliest", "--queue", place, "--json"))
    assert (one["broker"], one["queue"]) == (done[0]["broker"], done[0]["queue"])
    copy = f"{topic}-copy"
    rows(duemq(nameserver, "group", "clone", topic, copy, "--json"))
    assert offset_of(nameserver, copy, topic) == offset_of(nameserver, topic, topic)
    rows(duemq(nameserver, "group", "delete", copy, "--json"))
    assert duemq(nameserver, "group", "show", copy).returncode == Exit.NOT_FOUND


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--to", "yesterday"), Exit.USAGE),
        (("--to", "2030-01-01T00:00:00"), Exit.USAGE),
        ((), Exit.USAGE),
        (("--to", "latest", "--offset", "1"), Exit.USAGE),
        (("--offset", "1000000"), Exit.FAILED),
        (("--to", "latest", "--queue", "broker-0/77"), Exit.NOT_FOUND),
    ],
)
def test_what_cannot_be_reset_says_so_by_its_exit_code(
    nameserver: str, options: tuple[str, ...], code: Exit
) -> None:
    topic = topic_name()
    rows(duemq(nameserver, "topic", "create", topic, "--json"))
    rows(duemq(nameserver, "group", "create", topic, "--json"))
    done = duemq(nameserver, "group", "reset", topic, "--topic", topic, *options, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    assert json.loads(done.stdout)["error"]["message"]
    none = duemq(nameserver, "group", "reset", "nobody", "--topic", topic, "--to", "latest")
    assert none.returncode == Exit.NOT_FOUND


@pytest.mark.long
def test_a_group_has_retries_of_its_own(nameserver: str) -> None:
    group = topic_name()
    made = rows(duemq(nameserver, "group", "create", group, "--delays", "1s 1m", "--json"))
    assert made == [
        {
            "group": group,
            "retries_max": 16,
            "retry_delays_ms": [1_000, 60_000],
            "retry_exponential": None,
        }
    ]
    assert duemq(nameserver, "group", "create", group).returncode == Exit.FAILED
    [changed] = rows(duemq(nameserver, "group", "update", group, "--retries-max", "3", "--json"))
    assert (changed["retries_max"], changed["retry_delays_ms"]) == (3, [1_000, 60_000])
    growing = ("--exponential", "5s", "2", "2h")
    [changed] = rows(duemq(nameserver, "group", "update", group, *growing, "--json"))
    assert changed["retry_exponential"] == {
        "initial_ms": 5_000,
        "multiplier": 2.0,
        "max_ms": 7_200_000,
    }
    assert changed["retries_max"] == 3
    shown = duemq(nameserver, "group", "show", group)
    assert "retries: 3, after 5s x 2, at most 2h" in shown.stdout
    assert duemq(nameserver, "group", "update", topic_name()).returncode == Exit.NOT_FOUND


@pytest.mark.long
def test_messages_are_found_and_one_is_followed(nameserver: str) -> None:
    topic = topic_name()
    [first, *_] = sent(nameserver, topic, "--key", "k")
    sent(nameserver, topic, "--key", "other")
    found = rows(duemq(nameserver, "message", "find", topic, "--key", "k", "--json"))
    assert [row["body"] for row in found] == ["a", "b", "c", "d"]
    assert set(found[0]) >= RECEIVED
    by_id = ("message", "find", topic, "--id", str(first["message_id"]), "--since", "-1h")
    assert [row["offset"] for row in rows(duemq(nameserver, *by_id, "--json"))] == [first["offset"]]
    place = ("--broker", str(first["broker"]), "--queue", str(first["queue"]))
    [one] = rows(
        duemq(
            nameserver,
            *("message", "find", topic, *place, "--offset", str(first["offset"])),
            *("--limit", "1", "--json"),
        )
    )
    assert one == found[0]
    people = duemq(nameserver, "message", "find", topic, "--until", "-1h")
    assert (people.returncode, people.stderr) == (0, "no such message is kept\n")
    received(nameserver, topic, 8)
    life = rows(duemq(nameserver, "message", "show", topic, str(first["message_id"]), "--json"))
    assert [row["kind"] for row in life] == ["stored", "delivery"]
    assert (life[1]["group"], life[1]["state"]) == (topic, "consumed")
    story = duemq(nameserver, "message", "show", topic, str(first["message_id"]))
    assert f"group {topic}: consumed" in story.stdout
    nobody = duemq(nameserver, "message", "show", topic, "nobody")
    assert nobody.returncode == Exit.NOT_FOUND
    assert duemq(nameserver, "message", "find", topic_name()).returncode == Exit.NOT_FOUND


@pytest.mark.long
def test_a_delayed_message_is_followed(nameserver: str) -> None:
    topic = topic_name()
    rows(duemq(nameserver, "topic", "create", topic, "--json"))
    [far] = rows(duemq(nameserver, "send", topic, "x", "--delay", "1h", "--json"))
    life = rows(duemq(nameserver, "message", "show", topic, far["message_id"], "--json"))
    assert [row["kind"] for row in life] == ["accepted"]
    [near] = rows(duemq(nameserver, "send", topic, "y", "--delay", "0s", "--json"))
    received(nameserver, topic, 1)
    life = rows(duemq(nameserver, "message", "show", topic, near["message_id"], "--json"))
    assert [row["kind"] for row in life] == ["accepted", "stored", "delivery"]
    assert life[1]["due_ms"] == near["due_ms"]


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


@pytest.mark.long
def test_an_expression_selects(nameserver: str) -> None:
    topic = topic_name()
    for price in ("5", "15", "dear"):
        rows(duemq(nameserver, "send", topic, price, "--property", f"price={price}", "--json"))
    (message,) = received(nameserver, topic, 1, "--sql", "price > 10")
    assert message["body"] == "15"
    refused = duemq(nameserver, "consume", topic, "--group", "other", "--sql", "price >", "--json")
    assert refused.returncode == Exit.USAGE
    (row,) = [json.loads(line) for line in refused.stdout.splitlines()]
    assert row["error"]["field"] == "filter"
    assert "line 1, column 8" in row["error"]["message"]


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
    command = [sys.executable, "-m", "duemq_cli", "send", topic_name(), "-", "--json"]
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
    command = [sys.executable, "-m", "duemq_cli", "consume", topic, "--group", topic]
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
