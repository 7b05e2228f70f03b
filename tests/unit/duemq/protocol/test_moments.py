from datetime import UTC, datetime, timedelta, timezone, tzinfo

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol import moments

NOW_MS = 1_800_000_000_000


class Nowhere(tzinfo):
    def utcoffset(self, _: datetime | None) -> None:
        return None


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        (0, 0),
        (1_700_000_000_123, 1_700_000_000_123),
        ("1700000000123", 1_700_000_000_123),
        ("now", NOW_MS),
        ("-1h", NOW_MS - 3_600_000),
        (" -1h30m ", NOW_MS - 5_400_000),
        ("-250ms", NOW_MS - 250),
        ("1970-01-01T00:00:01Z", 1_000),
        ("1970-01-01T01:00:01+01:00", 1_000),
        (datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), 1_000),
        (datetime(1970, 1, 1, 0, 0, 1, 999, tzinfo=UTC), 1_000),
        (datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), 0),
    ],
)
def test_moments(moment: object, expected: int) -> None:
    assert moments.epoch_ms(moment, NOW_MS, "since") == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "moment",
    [
        -1,
        True,
        1.5,
        None,
        "",
        "-",
        "--1h",
        "-soon",
        "+1h",
        "yesterday",
        "2030-01-01",
        "2030-01-01T00:00:00",
        "9" * 40,
        "-99999999d",
        datetime(2030, 1, 1),
        datetime(2030, 1, 1, tzinfo=Nowhere()),
        datetime(1969, 1, 1, tzinfo=UTC),
    ],
)
def test_what_is_no_moment_is_refused_by_field(moment: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        moments.epoch_ms(moment, NOW_MS, "since")  # type: ignore[arg-type]
    assert caught.value.field == "since"
    assert caught.value.limit


@pytest.mark.parametrize(
    "moment", [1_790_000_000, "1790000000", 2030_01_31, "20300131", "2030", "1"]
)
def test_a_number_that_looks_like_seconds_or_a_date_is_refused(moment: object) -> None:
    with pytest.raises(InvalidArgument, match=f"{moment} looks like seconds or a date") as raised:
        moments.epoch_ms(moment, 0, "since")  # type: ignore[arg-type]
    assert raised.value.field == "since"
