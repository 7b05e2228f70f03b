"""What people want to know of a span beside its times.  Pure."""

from __future__ import annotations

from duemq_analytics.waterfall.places import Span


def told(span: Span) -> str:
    """What else people want to know of it."""
    said = []
    if span["status"] == "ERROR":
        said.append(f"failed: {span['error_type'] or 'no reason given'}")
    if span["attempt"]:
        said.append(f"attempt {span['attempt'] + 1}")
    if span["lateness_ms"] is not None:
        said.append(f"{span['lateness_ms']} ms late")
    if span["queue"] is not None and span["broker"]:
        place = f"{span['broker']}/{span['queue']}"
        said.append(f"{place} @ {span['queue_offset']}")
    if span["batch_count"] and span["batch_count"] > 1:
        said.append(f"with {span['batch_count'] - 1:,} others")
    return ", ".join(said)
