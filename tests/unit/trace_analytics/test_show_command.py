import subprocess
import sys

import pytest

from duemq.errors import InvalidArgument
from duemq_analytics import show_command

NOW_MS = 1_800_000_000_000
MADE_MS = NOW_MS - 120_000
ID = f"{MADE_MS:011x}" + "0" * 17


@pytest.mark.parametrize(
    ("since", "message_id", "begin_ms"),
    [
        ("1h", "mine", NOW_MS - 3_600_000),
        ("-2h", "mine", NOW_MS - 7_200_000),
        ("2027-01-15T07:00:00Z", "mine", NOW_MS - 3_600_000),
        ("1h", ID, MADE_MS - 60_000),
        ("90s", ID, NOW_MS - 90_000),
    ],
)
def test_from_when_on_spans_are_read(since, message_id, begin_ms):
    assert show_command._since_ms(since, message_id, NOW_MS) == begin_ms


def test_what_is_no_time_is_said():
    with pytest.raises(InvalidArgument, match="since"):
        show_command._since_ms("yesterday", "mine", NOW_MS)


def test_it_runs_without_spark():
    code = (
        "import sys; from duemq_analytics.command import trace;"
        "assert 'show' in trace.commands; assert 'pyspark' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
