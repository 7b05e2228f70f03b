"""What a shard's timers have come to, counted.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Ledger:
    """accepted = pending + fired + cancelled + replaced + dropped + lost."""

    accepted: int = 0
    fired: int = 0
    cancelled: int = 0
    in_flight: int = 0  # fired and not yet answered by a broker
    lost: int = 0  # damaged on the disk, and set aside by an operator
    replaced: int = 0  # another one came for them: under the same key, or with another due time
    dropped: int = 0  # kept back by a hold that was resumed without them

    @property
    def pending(self) -> int:
        """Accepted, and nothing else happened."""
        gone = self.fired + self.cancelled + self.replaced + self.dropped
        return self.accepted - gone - self.lost

    @property
    def empty(self) -> bool:
        """Nothing waits, or is on its way."""
        return not (self.pending or self.in_flight)
