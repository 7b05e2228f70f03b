"""What every store of records does: its test is a StoreContract with a fixture `open_store`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId
from duemq_server.replication.stores.store import Conflict, Store

A, B = (ReplicaId(name, name * 32) for name in "ab")
RECORD = Record("g", 7, frozenset("ab"), frozenset({A, B}), 4, A)
COMPETITORS = 6
WAIT_S = 60

OpenStore = Callable[[], Store]
"""Opens one more store of the same group, as another process would; the fixture closes it."""


def found(store: Store) -> HeldRecord:
    """What it holds."""
    there = store.read()
    assert there is not None
    return there


class StoreContract:
    """Derive a class `Test…` from it."""

    def test_a_record_is_put_where_none_is(self, open_store: OpenStore) -> None:
        store = open_store()
        assert store.read() is None
        version = store.swap(None, RECORD)
        assert store.read() == open_store().read() == HeldRecord(version, RECORD, None)
        with pytest.raises(Conflict) as conflict:
            store.swap(None, RECORD)
        assert conflict.value.found == HeldRecord(version, RECORD)

    def test_a_record_is_put_where_its_version_is(self, open_store: OpenStore) -> None:
        store = open_store()
        first = store.swap(None, RECORD)
        changed = records.with_member(RECORD, "c")
        second = open_store().swap(first, changed)
        assert second != first
        with pytest.raises(Conflict) as conflict:
            store.swap(first, RECORD)
        assert conflict.value.found == HeldRecord(second, changed)
        assert found(store).record == changed

    def test_where_no_record_is_no_version_fits(self, open_store: OpenStore) -> None:
        store = open_store()
        with pytest.raises(Conflict) as conflict:
            store.swap("v1", RECORD)
        assert conflict.value.found is None
        assert store.read() is None

    def test_of_swaps_at_the_same_time_one_wins(self, open_store: OpenStore) -> None:
        stores = [open_store() for _ in range(COMPETITORS)]
        version = stores[0].swap(None, RECORD)
        won: list[str] = []
        lost: list[Conflict] = []

        def swap(store: Store) -> None:
            try:
                won.append(store.swap(version, records.with_member(RECORD, "c")))
            except Conflict as conflict:
                lost.append(conflict)

        threads = [threading.Thread(target=swap, args=[store]) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert (len(won), len(lost)) == (1, COMPETITORS - 1)
        assert all(each.found and each.found.version == won[0] for each in lost)

    def test_a_lease_changes_with_each_renewal(self, open_store: OpenStore) -> None:
        store, other = open_store(), open_store()
        store.swap(None, RECORD)
        assert found(other).lease is None
        assert not found(other).dead  # it has not begun
        seen = set()
        for _ in range(3):
            store.renew(A)
            seen.add(found(other).lease)
            assert found(store).lease in seen
            assert not found(other).dead
        assert len(seen) == 3
        assert None not in seen

    def test_a_lease_may_begin_before_the_takeover(self, open_store: OpenStore) -> None:
        store = open_store()
        store.renew(A)
        assert store.read() is None
        store.swap(None, RECORD)
        assert found(open_store()).lease is not None

    def test_the_lease_is_of_who_leads(self, open_store: OpenStore) -> None:
        store, other = open_store(), open_store()
        version = store.swap(None, RECORD)
        store.renew(A)
        other.read()
        store.swap(version, replace(RECORD, leader=B, epoch=5))
        assert found(store).lease is None
        other.renew(B)
        lease = found(store).lease
        assert lease is not None
        store.release(A)
        assert found(store).lease == lease

    def test_a_lease_is_released(self, open_store: OpenStore) -> None:
        store = open_store()
        store.swap(None, RECORD)
        store.renew(A)
        assert found(store).lease is not None
        store.release(A)
        assert found(open_store()).lease is None
        assert found(store).record == RECORD
        store.release(A)
        store.renew(A)
        assert found(store).lease is not None
