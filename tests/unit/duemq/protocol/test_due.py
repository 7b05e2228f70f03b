from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Context, Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import InvalidArgument
from duemq.protocol.due import (
    DELAY_LEVELS,
    DELAYS_MS,
    DUE_MS,
    DUE_MS_MAX,
    Due,
    delay_ms,
    deliver_at_ms,
    due_of,
)


@pytest.mark.parametrize(
    ("delay", "milliseconds"),
    [
        (0, 0),
        (5, 5_000),
        (0.25, 250),
        (0.1, 100),
        (0.0001, 1),  # rounded up: never early
        (1.0005, 1_001),
        ("250ms", 250),
        ("5s", 5_000),
        ("1.5h", 5_400_000),
        ("1h30m", 5_400_000),
        ("1d 2h", 93_600_000),
        (" 2m ", 120_000),
        ("0s", 0),
        (timedelta(seconds=2, microseconds=1), 2_001),
        (timedelta(days=1), 86_400_000),
        (DUE_MS_MAX // 1000, DUE_MS_MAX // 1000 * 1000),
    ],
)
def test_delays(delay, milliseconds):
    assert delay_ms(delay) == milliseconds


@pytest.mark.parametrize(
    "delay",
    [
        -1,
        -0.001,
        -0.0001,
        -1e-300,
        float("nan"),
        float("inf"),
        1e300,
        True,
        "",
        "5",
        "5 parsecs",
        "-5s",
        "s",
        "5s!",
        "٣s",
        timedelta(microseconds=-1),
        timedelta.max,
        b"5s",
        [5],
    ],
)
def test_illegal_delays(delay):
    with pytest.raises(InvalidArgument) as raised:
        delay_ms(delay)
    assert raised.value.field == "delay"
    assert raised.value.limit


@pytest.mark.parametrize(
    ("delay", "milliseconds"),
    [
        (100_007, 100_007_000),
        (12.3456, 12_346),
        ("1d1h1m7s", 90_067_000),
        (timedelta(days=1, seconds=7), 86_407_000),
    ],
)
def test_how_exact_the_application_reckons_shortens_no_delay(delay, milliseconds):
    for context in Context(2), Context(2, traps=list(Context().flags)):
        with localcontext(context):
            assert delay_ms(delay) == milliseconds


@given(st.floats(0, 1e9))
def test_a_delay_is_never_shortened(seconds):
    assert delay_ms(seconds) >= Decimal(str(seconds)) * 1000 > delay_ms(seconds) - 1


class Nowhere(tzinfo):
    def utcoffset(self, _):
        return None


@pytest.mark.parametrize(
    ("moment", "milliseconds"),
    [
        (0, 0),
        (1_790_000_000_000, 1_790_000_000_000),
        (DUE_MS_MAX, DUE_MS_MAX),
        (datetime(2026, 11, 21, tzinfo=UTC), 1_795_219_200_000),
        (datetime(2026, 11, 21, 0, 0, 0, 1, tzinfo=UTC), 1_795_219_200_001),
        (datetime(2026, 11, 21, 2, tzinfo=timezone(timedelta(hours=2))), 1_795_219_200_000),
        ("2026-11-21T00:00:00Z", 1_795_219_200_000),
        ("2026-11-21T01:00:00.5+01:00", 1_795_219_200_500),
        ("9999-12-31T23:59:59.999Z", DUE_MS_MAX),
    ],
)
def test_moments(moment, milliseconds):
    assert deliver_at_ms(moment) == milliseconds


@pytest.mark.parametrize(
    "moment",
    [
        -1,
        DUE_MS_MAX + 1,
        1.5,
        True,
        "tomorrow",
        "2026-11-21T00:00:00",
        "1969-12-31T23:59:59Z",
        "9999-12-31T23:59:59.9995Z",
        datetime(2026, 11, 21),
        datetime(2026, 11, 21, tzinfo=Nowhere()),
        None,
    ],
)
def test_illegal_moments(moment):
    with pytest.raises(InvalidArgument) as raised:
        deliver_at_ms(moment)
    assert raised.value.field == "deliver_at"


def test_one_of_three():
    assert due_of(None, None, None) is None
    assert due_of("1s", None, None) == Due(DELAYS_MS, 1_000)
    assert due_of(None, 5, None) == Due(DUE_MS, 5)
    assert due_of(None, None, 18) == Due(DELAY_LEVELS, 18)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        due_of("1s", 5, None)


@pytest.mark.parametrize("level", [0, -1, 2**32, 1.0, True, "3"])
def test_illegal_levels(level):
    with pytest.raises(InvalidArgument) as raised:
        due_of(None, None, level)
    assert raised.value.field == "delay_level"


@pytest.mark.parametrize("seconds", [10**7, 2030_01_31, 10**8, 1_790_000_000, 10**11 - 1])
def test_a_number_that_looks_like_seconds_is_refused(seconds):
    with pytest.raises(InvalidArgument, match=f"milliseconds .* {seconds} looks like seconds") as e:
        deliver_at_ms(seconds)
    assert (e.value.field, e.value.value) == ("deliver_at", str(seconds))


@pytest.mark.parametrize("milliseconds", [0, 10**7 - 1, 10**11, 1_790_000_000_000])
def test_other_numbers_are_milliseconds(milliseconds):
    assert deliver_at_ms(milliseconds) == milliseconds
