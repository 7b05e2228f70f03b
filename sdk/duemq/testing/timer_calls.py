"""The twin's requests to its one timer shard: answered as soon as they are made."""

from __future__ import annotations

import threading

from duemq.errors import DuemqError
from duemq.producing.keyed.calls import TimerCalls
from duemq.testing.broker import NAME, MemoryBroker
from duemq.transport.cluster_client import Client


class MemoryCalls(TimerCalls):
    """Messages under timer keys, stored at once."""

    def __init__(self, client: Client, broker: MemoryBroker, lock: threading.RLock) -> None:
        super().__init__(client)
        self._broker = broker
        self._broker_lock = lock  # guards the broker

    @property
    def shards(self) -> int:
        """One."""
        return 1

    async def ready(self, timeout_s: float) -> int:
        """It is known at once."""
        return self.shards

    def wake(self) -> None:
        """In the caller's thread."""
        self.run()

    def run(self) -> None:
        """Stores what was gathered."""
        with self.lock:
            taken = self.lanes.take()
        for call in taken:
            try:
                with self._broker_lock:
                    answer = self._broker.schedule_keyed(call.request(b""))
            except DuemqError as error:
                call.failed(error, asked=True)
            else:
                call.answered(NAME, answer)
            call.done = True
            with self.lock:
                self.lanes.ended(call)
