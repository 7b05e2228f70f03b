"""A broker as the dispatcher sees it: whether it can be sent to, and what is on its way there.

Owned by: Dispatcher.  No clock, no I/O.
"""

from __future__ import annotations

import dataclasses

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
    lanes: dict[LaneId, FireLane] = dataclasses.field(default_factory=dict)
    busy: dict[LaneId, FireLane] = dataclasses.field(default_factory=dict)  # with unacked batches

    def is_open(self) -> bool:
        """Whether more may be on its way there."""
        if not self.connected:
            return False
        if self.unacked_bytes < BROKER_BYTES_MAX:
            return True
        rejected = sum(lane.unacked_bytes for lane in self.busy.values() if lane.rejected)
        return self.unacked_bytes - min(rejected, REJECTED_BYTES_MAX) < BROKER_BYTES_MAX

    def takes(self, topic: str) -> bool:
        """Whether it takes what is sent of a topic, as far as is known."""
        lanes = (lane for lane in self.busy.values() if lane.id.topic == topic)
        return self.connected and not any(lane.failures for lane in lanes)
