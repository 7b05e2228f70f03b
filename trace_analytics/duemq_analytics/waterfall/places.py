"""Which frames had a message, by where it lay.  Pure.

A frame's span names up to 32 creation contexts.  Of one that leaves some out, the place tells the
rest: a frame is so many messages in a row, and its message's own spans say where that lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

from duemq.tracing.attributes import LAST_OFFSET, TIMED

PLACES_MAX = 10
"""Of a message, that its frames are looked for by.  More has only one whose id others have, too."""

CLOCKS_APART = timedelta(minutes=1)
"""So much may machines' clocks differ: spans are looked for from so long before they should begin,
or be stored, and until so long after."""

_OFFSET = re.compile(r"\d{1,18}", re.ASCII)

Span = Mapping[str, Any]
"""A row of schema.SPANS."""
Context: TypeAlias = tuple[str, str]
"""(trace id, span id), in hexadecimal."""


class Place(NamedTuple):
    """Where a message lies."""

    topic: str
    """That the producer named."""
    timed: bool
    """In %TIMER%, on its way there."""
    broker: str
    queue: int
    offset: int


Places: TypeAlias = Mapping[Place, set[str]]
"""Where a message lay, each with the groups that processed what they had from there."""


def named(row: Span) -> set[Context]:
    """A span's parent and links."""
    links = {(link["trace_id"], link["span_id"]) for link in row["links"] or ()}
    return whole(links | {(row["trace_id"], row["parent_span_id"])})


def whole(contexts: Iterable[tuple[str | None, str | None]]) -> set[Context]:
    """Without those that lack an id: zeros are none, and whoever may send writes any span."""
    return {(trace_id, span_id) for trace_id, span_id in contexts if trace_id and span_id}


def places_of(own: Iterable[Span]) -> dict[Place, set[str]]:
    """Of one message, from spans that have its id."""
    found: dict[Place, set[str]] = {}
    for row in own:
        if row["queue"] is None or row["queue_offset"] is None or not row["broker"]:
            continue
        timed = row["operation"] == "send" and bool(row["due_ms"])
        place = Place(row["topic"], timed, row["broker"], row["queue"], row["queue_offset"])
        if row["operation"] == "send":
            found.setdefault(place, set())
        elif row["operation"] == "process" and not row["attempt"]:
            # A later attempt came from the group's %RETRY% topic, whose frames are not traced.
            found.setdefault(place, set()).add(row["consumer_group"])
    return found


def covers(frame: Span, places: Places) -> bool:
    """Whether a frame that does not name all of its messages had one that lay there."""
    if leaves_out(frame) <= 0 or frame["queue_offset"] is None:
        return False
    attributes = dict(frame["attributes"] or ())
    timed = frame["operation"] == "schedule" or TIMED in attributes
    where = frame["topic"], timed, frame["broker"], frame["queue"]
    last = _offset(attributes.get(LAST_OFFSET))
    gaps = last is not None
    past = frame["queue_offset"] + (frame["batch_count"] or 1) if last is None else last + 1
    return any(
        place[:4] == where
        and frame["queue_offset"] <= place.offset < past
        # What lies between its first and its last is in a filtered one if the group took it.
        and (not gaps or frame["consumer_group"] in groups)
        for place, groups in places.items()
    )


def _offset(text: str | None) -> int | None:
    """Of an attribute, which has no column that checks it: anybody may write any text."""
    known = text is not None and _OFFSET.fullmatch(text)
    return int(known[0]) if known else None


def leaves_out(frame: Span) -> int:
    """How many traced messages of a frame its span does not name."""
    return (frame["sampled_count"] or frame["batch_count"] or 1) - len(named(frame))
