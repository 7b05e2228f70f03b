"""Which of the spans that two looks have found are of which message.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias

from duemq_analytics.waterfall.message_spans import contexts, is_of
from duemq_analytics.waterfall.places import (
    CLOCKS_APART,
    PLACES_MAX,
    Context,
    Place,
    Span,
    places_of,
)

Times: TypeAlias = tuple[int, int]
"""From, to: Unix ns, both inclusive."""

_MARGIN_NS = CLOCKS_APART // timedelta(microseconds=1) * 1_000


def contexts_of(own: Iterable[Span]) -> dict[str, set[Context]]:
    """The creation contexts of each message, by its id, from spans that have it."""
    found: dict[str, set[Context]] = {}
    for span in own:
        found.setdefault(span["message_id"], set()).update(contexts(span))
    return found


def places_to_look_at(own: Iterable[Span]) -> list[Place]:
    """Where the messages lay, from spans that have their ids; of each the first PLACES_MAX."""
    messages: dict[str, list[Span]] = {}
    for span in sorted(own, key=lambda span: span["start_ns"]):
        messages.setdefault(span["message_id"], []).append(span)
    found = [list(places_of(spans))[:PLACES_MAX] for spans in messages.values()]
    return list(dict.fromkeys(place for places in found for place in places))


def times_to_look_at(own: Iterable[Span]) -> list[Times]:
    """When frames of the messages may have begun, from spans that have their ids; in order."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for span in own:
        message_id, start = span["message_id"], span["start_ns"]
        first[message_id] = min(first.get(message_id, start), start)
        last[message_id] = max(last.get(message_id, start), start + span["duration_ns"])
    found: list[Times] = []
    for begin, end in sorted((first[each] - _MARGIN_NS, last[each] + _MARGIN_NS) for each in first):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def journeys(own: Sequence[Span], frames: Sequence[Span]) -> Mapping[str, list[Span]]:
    """The spans of each message, by its id, in the order of their starts."""
    found: dict[str, list[Span]] = {}
    for message_id, wanted in contexts_of(own).items():
        spans = [span for span in own if span["message_id"] == message_id]
        places = places_of(spans)
        spans += [frame for frame in frames if is_of(frame, wanted, places)]
        found[message_id] = sorted(spans, key=lambda span: (span["start_ns"], -span["duration_ns"]))
    return found
