"""Durations of a group, in ms.  Safety rests on none of them: they only say when to try."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """See each."""

    lease_ms: int = 6_000
    """A leader's lease ends so long after it was last seen to be renewed."""
    serve_ms: int = 4_500
    """The leader answers reads so long after it began to renew it."""
    renew_ms: int = 1_500
    """A leader renews its lease so often."""
    heartbeat_ms: int = 500
    """A leader says something to each follower so often."""
    silent_ms: int = 3_000
    """A stream on which nothing came for so long is of no use."""
    heard_ms: int = 1_000
    """A heartbeat that all in sync answered lets the leader serve so long after it was sent; who
    heard one does not stand for so long."""
    lag_max_ms: int = 3_000
    """A follower that was not at the leader's end for so long leaves the set."""
    jitter_ms: int = 300
    """Candidates do not stand at once."""
