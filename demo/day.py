"""The day of departures: reads the data file and compresses its clock.  Pure but for reading."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

DATA_FILE = "nyc-departures-2013-07-10.csv"
# The day lasts from the first departure to the last, 05:00 to 23:59: at this factor, 60 s.
SPEED_DEFAULT = 1_139.0


@dataclass(frozen=True)
class Departure:
    """A scheduled departure."""

    # Carrier and number: unique in a day.
    flight: str
    # Empty: not known; several flights then have nothing in common.
    tail: str
    origin: str
    minute: int
    cancelled: bool
    row: Mapping[str, str]
    late_min: int = 0
    """How much later than scheduled it left; not below 0."""

    @property
    def body(self) -> bytes:
        """The row as the message's body."""
        return json.dumps(self.row, separators=(",", ":")).encode()


def load_day() -> list[Departure]:
    """The day that comes with the package."""
    source = resources.files("duemq_server.demo").joinpath(DATA_FILE)
    with source.open(encoding="utf-8") as lines:
        return read_day(lines)


def read_day(lines: Iterable[str]) -> list[Departure]:
    """The departures in the file's order, which is that of their schedule."""
    return [
        Departure(
            flight=f"{row['carrier']}{row['flight']}",
            tail=row["tailnum"],
            origin=row["origin"],
            minute=_minute(row["sched_dep_time"]),
            cancelled=not row["dep_time"],
            row=row,
            late_min=max(0, int(row.get("dep_delay") or 0)),
        )
        for row in csv.DictReader(lines)
    ]


def schedule(day: Sequence[Departure], begin_ms: int, speed: float) -> dict[str, int]:
    """Due time of each flight, in epoch ms, when the first departs at `begin_ms`.

    At speed 60 a flight an hour after the first is due a minute after it.
    """
    first = min(departure.minute for departure in day)
    return {
        departure.flight: begin_ms + round((departure.minute - first) * 60_000 / speed)
        for departure in day
    }


def clock(minute: int) -> str:
    """A minute of the day, or of the night after it, as people write it."""
    return f"{minute // 60 % 24:02}:{minute % 60:02}"


def _minute(hmm: str) -> int:
    """Minute of the day of a time such as 959 or 1730."""
    clock = int(hmm)
    return clock // 100 * 60 + clock % 100
