import json
from datetime import UTC, datetime, timedelta

import pytest

from duemq.errors import MissingBroker, PartialAnswer
from duemq_analytics import __main__ as command
from duemq_analytics import failures, options
from duemq_analytics.report import BUCKETS_S, POINTS_MAX, bucket_s
from duemq_analytics.source.plan import QueueBounds, partitions, ranges, require_whole

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "width"), [(0, 1), (60, 1), (91, 2), (3_600, 60), (86_400, 1_800)]
)
def test_a_chart_s_buckets_follow_the_length_of_the_run(seconds, width):
    assert bucket_s(START, START + timedelta(seconds=seconds)) == width


def test_the_points_of_a_chart_are_bounded_up_to_three_months():
    for days in range(90):
        length = timedelta(days=days)
        assert length.total_seconds() / bucket_s(START, START + length) <= POINTS_MAX
    assert bucket_s(START, START + timedelta(days=4_000)) == BUCKETS_S[-1]


def test_a_missing_java_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    code = command.main(["report", "--output", str(tmp_path), "--json"])
    said = capsys.readouterr()
    assert code == 2
    assert "Spark needs Java 17" in json.loads(said.out)["error"]["message"]
    assert said.err.count("\n") == 1


def test_a_lost_broker_is_said_with_what_can_be_done(tmp_path, monkeypatch, capsys):
    def queues(client, settings):
        require_whole([MissingBroker("b2", "it fell silent")], settings, served=True)

    monkeypatch.setattr(command.QueueClient, "queues", queues)
    monkeypatch.setattr(command.session, "require_java", lambda: "java")
    assert command.main(["report", "--output", str(tmp_path), "--json"]) == 1
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert error["code"] == PartialAnswer("").code.name
    for text in (error["message"], said.err):
        assert "b2: it fell silent" in text
        assert "(trace land --skip-lost, then trace report --lake)" in text
        assert "failOnDataLoss" not in text


@pytest.mark.parametrize("messages", [1, 9_999_999, 400_000_000])
def test_a_topic_of_many_messages_with_few_spans_is_read_in_as_many_pieces_as_can_be(
    messages, monkeypatch
):
    queues = [QueueBounds("b", "h:1", queue, 7, 7 + messages // 8 + 1) for queue in range(8)]
    monkeypatch.setattr(command.QueueClient, "queues", lambda *_: queues)
    arguments = command._parser().parse_args(["report", "--output", "x"])
    _, reading = command._size(arguments, None)
    settings = options.parse(
        {name: str(value) for name, value in reading.items()},
        topic="%TRACE%",
        records_per_partition=options.TRACE_RECORDS_PER_PARTITION,
    )
    pieces = partitions(ranges(queues, settings), settings.records_per_partition)
    assert sum(piece.end - piece.start for piece in pieces) == 8 * (messages // 8 + 1)


def test_the_reader_s_own_words_are_found_in_sparks_error():
    text = (
        "[PYTHON_DATA_SOURCE_ERROR] Failed: Traceback (most recent call last):\n"
        '  File "x.py", line 1, in read\n'
        "duemq.errors.TopicNotFound: topic '%TRACE%' does not exist\n SQLSTATE: 38000"
    )
    assert failures.cause(text) == "topic '%TRACE%' does not exist"
    assert failures.cause("[X] something\nelse") == "[X] something"
