"""A replica's copy of the log, and a snapshot that cannot take its place."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from duemq_server.replication.protocol.follower import StreamBroken
from duemq_server.replication.protocol.record import Record, Refused
from duemq_server.replication.running.following.log_copy import LogCopy
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.crash.faulty_disk import FaultyDisk


class Arriving:
    """There is no space for it."""

    closed = False

    def install(self, log_start: int) -> None:
        raise StreamBroken("no space for the leader's snapshot")

    def close(self) -> None:
        self.closed = True


async def test_a_snapshot_without_space_leaves_the_log_in_use() -> None:
    log = ReplicaLog.open("/data/log", FaultyDisk())
    list(log.recover())
    state = SimpleNamespace(log=log, epochs=(), committed=0, applied=0)
    copy, arriving = LogCopy(state), Arriving()  # type: ignore[arg-type]
    with pytest.raises(StreamBroken, match="no space"):
        await copy.install(arriving, 800, 7)  # type: ignore[arg-type]
    assert arriving.closed
    copy.check()
    durable = asyncio.Event()
    copy.writing.on_durable = lambda position: durable.set()
    log.append(1, [b"x"])
    async with asyncio.timeout(30):
        await durable.wait()
    await copy.end()


async def test_a_snapshot_of_which_no_log_has_come_is_of_its_history() -> None:
    """An operator gave up what it knows, although its log holds none of that."""
    log = ReplicaLog.open("/data/log", FaultyDisk())
    list(log.recover())
    state = SimpleNamespace(log=log, epochs=(), committed=0, applied=0, store_id=7, known_to=0)
    copy = LogCopy(state)  # type: ignore[arg-type]
    elected = Record("g", 8, frozenset("ab"), frozenset(), formers=(7,))
    others = Record("h", 9, frozenset("ab"), frozenset())
    assert copy.former_to(elected) is copy.former_to(others) is None  # it has nothing
    state.known_to = 800
    assert copy.former_to(elected) == 800
    with pytest.raises(Refused, match="is another one's"):
        copy.former_to(others)
    state.store_id = 8
    assert copy.former_to(elected) is None
    await copy.end()


async def test_ids_of_the_group_before_losses_are_kept_before_another_one_is_taken() -> None:
    log = ReplicaLog.open("/data/log", FaultyDisk())
    list(log.recover())
    done: list[object] = []
    state = SimpleNamespace(log=log, epochs=(), committed=0, applied=0, store_id=7, known_to=800)
    state.rename = done.append
    copy = LogCopy(state)  # type: ignore[arg-type]
    copy.formers, copy.keep_formers = (5,), done.append
    await copy.take_store_id(Record("g", 8, frozenset("ab"), frozenset(), formers=(5, 7)))
    assert done == [(5, 7), 8]
    state.store_id = 8
    for older in ((), (5,), (5, 7)):  # a record that was set back, and adopted by an older release
        await copy.take_store_id(Record("g", 8, frozenset("ab"), frozenset(), formers=older))
    assert done == [(5, 7), 8]
    state.known_to = 0  # nothing is here: it is of this group, whatever was known
    await copy.take_store_id(Record("g", 8, frozenset("ab"), frozenset(), formers=(6,)))
    assert done[2:] == [(6,)]
    await copy.end()
