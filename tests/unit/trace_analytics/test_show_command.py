import json
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
from click.testing import CliRunner

from duemq.errors import InvalidArgument
from duemq.v1.trace_pb2 import SpanBatch, StringColumn
from duemq_analytics import show_command
from duemq_cli.session import Session

NOW_MS = 1_800_000_000_000
MADE_MS = NOW_MS - 120_000
ID = f"{MADE_MS:011x}" + "0" * 17


@pytest.mark.parametrize(
    ("since", "message_id", "begins_ms"),
    [
        ("1h", "mine", [NOW_MS - 3_600_000]),
        ("-2h", "mine", [NOW_MS - 7_200_000]),
        ("2027-01-15T07:00:00Z", "mine", [NOW_MS - 3_600_000]),
        ("1h", ID, [MADE_MS - 60_000, NOW_MS - 3_600_000]),
        ("90s", ID, [NOW_MS - 90_000]),
    ],
)
def test_from_when_on_spans_are_read(since, message_id, begins_ms):
    assert show_command._begins_ms(since, message_id, NOW_MS) == begins_ms


def test_what_is_no_time_is_said():
    with pytest.raises(InvalidArgument, match="since"):
        show_command._begins_ms("yesterday", "mine", NOW_MS)


def test_it_runs_without_spark():
    code = (
        "import sys; from duemq_analytics.command import trace;"
        "assert 'show' in trace.commands; assert 'pyspark' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_a_producer_whose_clock_is_ahead_has_sent_is_found_all_the_same(monkeypatch):
    """Its ids say that nothing was there before; the spans were stored by the broker's clock."""
    stored_ms = MADE_MS - 3_600_000
    body = SpanBatch(
        rows=1,
        span_ids=b"12345678",
        start_ns=[MADE_MS * 10**6],
        message_id=StringColumn(values=[ID], rows=[0]),
    ).SerializeToString()
    record = SimpleNamespace(body=body, broker="b", queue=0, offset=0)
    asked = []

    def scan(consumer, described, since_ms):
        asked.append(since_ms)
        there = [record] if stored_ms >= since_ms else []
        return nullcontext(SimpleNamespace(messages=lambda: there, missing=()))

    monkeypatch.setattr(show_command, "PullConsumer", Mock())
    monkeypatch.setattr(show_command, "TraceScan", scan)
    monkeypatch.setattr(show_command.time, "time_ns", lambda: NOW_MS * 10**6)
    monkeypatch.setattr(Session, "admin", MagicMock())
    found = CliRunner().invoke(show_command.show, [ID, "--since", "2h", "--json"])
    assert json.loads(found.stdout)["message_id"] == ID
    assert asked == [MADE_MS - 60_000, NOW_MS - 7_200_000]
