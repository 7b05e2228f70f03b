"""A broker as the dispatcher sees it: whether it can be sent to, and what is on its way there.

Owned by: Dispatcher.  No clock, no I/O.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from duemq_server.timer_service.scheduling.fire_lane import FireLane
from duemq_server.timer_service.timers.log_entries import LaneId

# Of one broker, dispatched and not answered; beyond it timers wait here.  All of it is in front of
# what another topic has due now; with much less a broker has to wait (bench/README.md, "A herd").
BROKER_BYTES_MAX = 2 * 1024 * 1024
# Of what a broker rejects for its own sake so much does not count: it holds up no other topic.
REJECTED_BYTES_MAX = 64 * 1024 * 1024


@dataclasses.dataclass(slots=True)
class Peer:
    """A broker as the dispatcher sees it."""

    name: str
    connected: bool = False
    down_since_ms: int = 0
    unacked_bytes: int = 0
    rejected_bytes: int = 0  # of them, in lanes whose first batch was rejected
    refusing: Counter[str] = dataclasses.field(default_factory=Counter)
    """Lanes whose first batch was refused or rejected, by topic."""
    lanes: dict[LaneId, FireLane] = dataclasses.field(default_factory=dict)
    busy: dict[LaneId, FireLane] = dataclasses.field(default_factory=dict)  # with unacked batches

    def is_open(self) -> bool:
        """Whether more may be on its way there."""
        if not self.connected:
            return False
        if self.unacked_bytes < BROKER_BYTES_MAX:
            return True
        rejected = min(self.rejected_bytes, REJECTED_BYTES_MAX)
        return self.unacked_bytes - rejected < BROKER_BYTES_MAX

    def takes(self, topic: str) -> bool:
        """Whether it takes what is sent of a topic, as far as is known."""
        return self.connected and not self.refusing[topic]

    def count(self, lane: FireLane, sign: int) -> None:
        """Takes a lane out of the counts (-1) before it is changed, and into them (1) behind."""
        self.rejected_bytes += sign * lane.unacked_bytes if lane.rejected else 0
        self.refusing[lane.id.topic] += sign if lane.failures else 0
        if not self.refusing[lane.id.topic]:
            del self.refusing[lane.id.topic]
