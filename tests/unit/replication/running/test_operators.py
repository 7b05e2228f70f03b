"""What an operator decides, and what he is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.record import Found, Record, ReplicaId
from duemq_server.replication.running.operators import Operators

A, B = (ReplicaId(name, name * 32) for name in "ab")


class Store:
    """Its record is lost, or set back; what is asked of it is kept."""

    def __init__(self, record: Record | None) -> None:
        self.record = record
        self.asked: list[Record] = []

    async def read(self) -> Found | None:
        return Found("v1", self.record) if self.record is not None else None

    async def swap(self, version: str | None, wanted: Record) -> str:
        self.asked.append(wanted)
        return "v2"


def operators(store: Store, last_epoch: int = 4) -> Operators:
    """Of a replica whose log ends in that epoch, and that does not lead."""
    copy = SimpleNamespace(epochs=SimpleNamespace(last=last_epoch), check_history=lambda _: None)
    life: Any = SimpleNamespace(
        started=True,
        leading=None,
        settings=SimpleNamespace(name="g", replica="a", replicas=("a", "b")),
        me=A,
        state=SimpleNamespace(store_id=7, log=SimpleNamespace(end_position=800)),
        store=store,
        campaign=SimpleNamespace(copy=copy, role="joining"),
    )
    return Operators(life)


async def test_what_an_operator_decides_gives_no_epoch_a_second_time() -> None:
    """Others may have led since this log ends; and the store may forget a decision, too."""
    for record in (None, Record("g", 7, frozenset("ab"), frozenset({B}), 3, B)):
        store = Store(record)
        for _ in range(2):
            await operators(store).adopt(confirmed=True)
            if record is not None:
                await operators(store).elect(confirmed=True)
        epochs = [each.epoch for each in store.asked]
        assert len(epochs) == len(set(epochs)) >= 2
        assert min(epochs) >= 4 + records.LEAP_MIN
