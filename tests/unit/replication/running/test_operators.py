"""What an operator decides, and what he is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from duemq.errors import InvalidArgument, ReadOnly, Unavailable
from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId
from duemq_server.replication.running.leading.log_kept import LogKept
from duemq_server.replication.running.operators import Operators
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.stores.store import Conflict, StoreError
from duemq_server.timer_service.replica import TimerReplica
from duemq_server.timer_service.settings import Settings as TimerSettings

A, B = (ReplicaId(name, name * 32) for name in "ab")


class Store:
    """Its record is lost, or set back; what is asked of it is kept."""

    def __init__(self, record: Record | None, error: Exception | None = None) -> None:
        """`error`: what a swap raises."""
        self.record = record
        self.error = error
        self.twice: Callable[[Record], Record] | None = None
        """What stands between asks again, and answers by that; what is there by then."""
        self.asked: list[Record] = []

    async def read(self) -> HeldRecord | None:
        return HeldRecord("v1", self.record) if self.record is not None else None

    async def swap(self, version: str | None, wanted: Record) -> str:
        self.asked.append(wanted)
        if self.error is not None:
            raise self.error
        if self.twice is not None:
            raise Conflict(HeldRecord("v2", self.twice(wanted)))
        return "v2"


def operators(
    store: Store,
    last_epoch: int = 4,
    *,
    unfit: str = "",
    installing: object = None,
    formers: tuple[int, ...] = (),
    then: str = "",
) -> Operators:
    """Of a replica whose log ends in that epoch, and that does not lead."""
    copy = SimpleNamespace(
        epochs=SimpleNamespace(last=last_epoch), check_history=lambda _: None, formers=formers
    )
    life: Any = SimpleNamespace(
        started=True,
        leading=None,
        settings=SimpleNamespace(name="g", replica="a", replicas=("a", "b")),
        me=A,
        state=SimpleNamespace(store_id=7, log=SimpleNamespace(end_position=800)),
        store=store,
        service=SimpleNamespace(after_loss=lambda: then),
        campaign=SimpleNamespace(
            copy=copy,
            role="joining",
            streams=SimpleNamespace(installing=installing),
            unfit=unfit,
        ),
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


@pytest.mark.parametrize("record", [None, Record("g", 7, frozenset("ab"), frozenset({B}), 3, B)])
async def test_who_adopts_and_accepts_a_loss_gets_a_new_store(record: Record | None) -> None:
    """What is cached of the lost history never meets the new one."""
    store = Store(record)
    assert "new store" in await operators(store).adopt(confirmed=True, accept_loss=True)
    assert "new store" not in await operators(store).adopt(confirmed=True)
    new, same = store.asked
    assert new.store_id != 7
    assert new.formers == (7,)
    assert (same.store_id, same.formers) == (7, ())


async def test_what_is_left_to_be_done_after_a_loss_is_told_when_it_was_accepted() -> None:
    store = Store(Record("g", 7, frozenset("ab"), frozenset({B}), 3, B))
    asked = operators(store, then="release it")
    for text in (
        await asked.elect(confirmed=True),
        await asked.adopt(confirmed=True, accept_loss=True),
    ):
        assert text.endswith("; release it")
    for text in (
        await asked.elect(confirmed=False),
        await asked.adopt(confirmed=False, accept_loss=True),
        await asked.adopt(confirmed=True),
    ):
        assert "release it" not in text


def test_a_timer_shard_waits_for_the_release_of_its_queues() -> None:
    told = TimerReplica(TimerSettings(name="t", data_dir="/nowhere", shard=3)).after_loss()
    assert "`duemq timer release 3 --accept-loss`" in told


async def test_who_adopts_knows_the_ids_of_the_group_before_losses_by_itself() -> None:
    """The record is gone, or is one from before: its handles are known all the same."""
    for record in (None, Record("g", 5, frozenset("ab"), frozenset({B}), 3, B, formers=(4,))):
        store = Store(record)
        assert await operators(store, formers=(4, 5)).adopt(confirmed=True)
        assert await operators(store, formers=(4, 5)).adopt(confirmed=True, accept_loss=True)
        kept, lost = (each.formers for each in store.asked)
        assert (kept, lost) == ((4, 5), (4, 5, 7))


@pytest.mark.parametrize(
    ("error", "told"),
    [(Conflict(None), "nothing was done"), (StoreError("no answer in time"), "may be done yet")],
)
async def test_whether_it_was_done_is_told(error: Exception, told: str) -> None:
    """An answer that was lost says nothing; who asks for an election again gives up more."""
    asked = operators(Store(None, error))
    with pytest.raises(Unavailable, match=told):
        await asked.adopt(confirmed=True)


def led(wanted: Record) -> Record:
    """It took over at once."""
    known = {"address": "h:1", "last_epoch": 4, "min_insync": 1, "now_ms": 0}
    return records.taken_over(wanted, A, **known)


def by_another(wanted: Record) -> Record:
    return replace(wanted, in_sync=frozenset({B}), epoch=wanted.epoch + 2)


async def test_what_was_done_by_a_request_that_was_repeated_is_done() -> None:
    store = Store(Record("g", 7, frozenset("ab"), frozenset({B}), 3, B))
    for store.twice in (lambda wanted: wanted, led):
        assert "history from now on" in await operators(store).adopt(confirmed=True)
        assert "leads with 800 bytes" in await operators(store).elect(confirmed=True)
    store.twice = by_another
    with pytest.raises(Unavailable, match="nothing was done"):
        await operators(store).adopt(confirmed=True)


@pytest.mark.parametrize("known", [{"unfit": "its log ends"}, {"installing": object()}])
async def test_who_cannot_lead_is_not_made_to(known: dict[str, Any]) -> None:
    """The record would name it alone, and nobody would lead."""
    store = Store(Record("g", 7, frozenset("ab"), frozenset({B}), 3, B))
    asked = operators(store, **known)
    for decision in (asked.adopt, asked.elect):
        with pytest.raises(InvalidArgument, match=r"its (log|disk)"):
            await decision(confirmed=True)
    assert not store.asked


@pytest.mark.parametrize("other", [{"group": "h"}, {"store_id": 8}, {"epoch": 4}])
async def test_a_snapshot_goes_to_its_own_group(other: dict[str, Any]) -> None:
    """At an address that was another group's there may be one of the same epoch."""
    record = Record("g", 7, frozenset("ab"), frozenset({A}), 5, A)
    leader = Leader(
        A, HeldRecord("v1", record), Epochs(), start=0, committed=0, min_insync=1, now_ms=0
    )
    taken: list[bool] = []
    life: Any = SimpleNamespace(
        leading=SimpleNamespace(leader=leader, kept=LogKept(leader)),
        state=SimpleNamespace(log=SimpleNamespace(start_position=0)),
        service=SimpleNamespace(snapshot=taken.append),
    )
    known = {"group": "g", "store_id": 7, "epoch": 5, "replica": "b"}

    async def write(part: pb.SnapshotPart) -> None:
        raise AssertionError

    with pytest.raises(ReadOnly, match="no checkpoint yet"):
        await Operators(life).send_snapshot(pb.GetSnapshotRequest(**known), write)
    with pytest.raises(Unavailable, match="does not lead that group"):
        await Operators(life).send_snapshot(pb.GetSnapshotRequest(**known | other), write)
    assert len(taken) == 1
