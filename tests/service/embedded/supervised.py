"""What tests of the supervisor share: stand-ins for members, and its events to wait for."""

import queue
from pathlib import Path

import pytest

from duemq_server.local_cluster import ClusterEvent, plan, readiness

HERE = Path(__file__).parent
WAIT_S = 60


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """A module of this folder runs in place of brokers and timer services."""
    monkeypatch.setitem(plan.MODULES, "broker", module)
    monkeypatch.setitem(plan.MODULES, "timer", module)
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    # A question that is given up says of somebody who serves that nobody leads.
    monkeypatch.setattr(readiness, "RPC_TIMEOUT_S", WAIT_S)


def order(directory: Path, member: str, name: str) -> Path:
    """Tells a stand-in to misbehave; without the file it does no more."""
    orders = directory / f"{member}.orders"
    orders.mkdir(exist_ok=True)
    (orders / name).touch()
    return orders / name


class Events:
    """What the supervisor says."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ClusterEvent] = queue.SimpleQueue()
        self.seen: list[str] = []

    def __call__(self, event: ClusterEvent) -> None:
        self._queue.put(event)

    def wait(self, name: str) -> ClusterEvent:
        while True:
            event = self._queue.get(timeout=WAIT_S)
            self.seen.append(event.event)
            if event.event == name:
                return event

    def drained(self) -> list[str]:
        """The names of all events so far."""
        while not self._queue.empty():
            self.seen.append(self._queue.get().event)
        return self.seen
