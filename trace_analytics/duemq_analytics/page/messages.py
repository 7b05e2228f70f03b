"""Tables of single messages: the slowest, the latest, and the suspects, each with its id."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from duemq_analytics import charts
from duemq_analytics.page.tables import Column, Row, Table, ms, text
from duemq_analytics.waterfall.places import CLOCKS_APART

_US_PER_MS = 1_000


def tables(examples: Sequence[Row], totals: Mapping[str, int]) -> list[Table]:
    """`totals`: how many suspects of a kind there are in all."""
    rows = [row | {"show": show_command(row)} for row in map(dict, examples)]

    def of(kind: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["kind"] == kind]

    return [
        Table(
            "Slowest messages",
            "From the start of the send to the start of a group's first callback; messages without "
            "a due time, each with the group that waited longest.",
            (*_MESSAGE, _GROUP, _SENT, ("end to end", "us", _of_us), _SHOW),
            of("slowest"),
        ),
        Table(
            "Latest messages",
            "From the due time to the start of a group's first callback.",
            (*_MESSAGE, _GROUP, _SENT, ("late", "us", _of_us), _SHOW),
            of("latest"),
        ),
        Table(
            "Suspects: sent, never received",
            "Accepted, and no callback has had them so far; the ones sent last. Among them are "
            "cancelled messages, those put off by more than an hour, those that were read without "
            "a callback or by consumers that do not trace, and those whose spans were dropped.",
            (*_MESSAGE, _SENT, _SHOW),
            of("suspect"),
            _of_all(len(of("suspect")), totals["unreceived"]),
        ),
        Table(
            "Suspects: processed twice",
            "A group's callback ended without an error more than once; the ones sent last.",
            (*_MESSAGE, _GROUP, _SENT, ("times", "done", text), _SHOW),
            of("twice"),
            _of_all(len(of("twice")), totals["twice"]),
        ),
    ]


def kinds_of_error(rows: Sequence[Row]) -> Table:
    """What failed how often, with the id of a message that it happened to last."""
    return Table(
        "Errors by kind",
        "What spans that failed say of it, the most frequent first, with the last message that has "
        "one. Frames (store, receive, …) have no message's id.",
        (
            ("topic", "topic", text),
            ("operation", "operation", text),
            _GROUP,
            ("error", "error_type", text),
            ("errors", "errors", charts.number),
            ("last (UTC)", "last_ts", _time),
            ("message", "message_id", text),
        ),
        rows,
    )


def show_command(row: Row) -> str:
    """What draws the message in a terminal, to be pasted into a shell."""
    since = charts.moment(row["sent_ts"]) - CLOCKS_APART
    message_id = shlex.quote(row["message_id"])
    end = "-- " if message_id.startswith("-") else ""
    return f"duemq trace show --since {since:%Y-%m-%dT%H:%M:%SZ} {end}{message_id}"


def _of_all(shown: int, total: int) -> str:
    return f"{shown:,} of {total:,}." if total > shown else ""


def _of_us(us: int) -> str:
    return ms(us / _US_PER_MS)


def _time(value: Any) -> str:
    return f"{charts.moment(value):%Y-%m-%d %H:%M:%S.%f}"[:-3]


_MESSAGE: tuple[Column, ...] = (
    ("topic", "topic", text),
    ("message", "message_id", text),
)
_SENT: Column = ("sent (UTC)", "sent_ts", _time)
_GROUP: Column = ("group", "consumer_group", text)
_SHOW: Column = ("in a terminal", "show", text)
