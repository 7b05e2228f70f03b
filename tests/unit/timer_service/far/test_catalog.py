"""Which entries of a period file an offset is looked for in."""

import numpy as np

from duemq_server.timer_service.far.catalog import (
    ANY,
    ENTRY,
    UNKNOWN,
    Block,
    Catalog,
    Ranges,
    Table,
)

PERIOD = (0, 1_000)


def block_at(position: int) -> Block:
    return Block("f", position, 100, 2, 0, 10, 20)


def ranges(source: int, first: int, last: int) -> Ranges:
    return Ranges(np.array([source], dtype=np.uint32), np.array([first]), np.array([last]))


def test_the_order_is_kept_until_the_entries_change() -> None:
    catalog = Catalog()
    catalog.add(block_at(0), PERIOD, ranges(1, 5, 9))
    [before] = catalog.view().tables
    order = before.order
    other = Block("g", 0, 100, 2, 0, 10, 20)
    catalog.add(other, PERIOD, ranges(1, 0, 4))

    assert catalog.view().tables[0] is before
    assert before.order is order

    catalog.add(block_at(100), PERIOD, ranges(1, 0, 4))
    [after, _] = catalog.view().tables
    assert after.order.at.tolist() == [1, 0]
    assert before.order.at.tolist() == [0]


def test_learnt_ranges_are_in_the_order() -> None:
    catalog = Catalog()
    catalog.add(block_at(0), PERIOD, UNKNOWN)
    [before] = catalog.view().tables
    assert len(before.order.at) == 0
    assert before.unknown.tolist() == [0]

    catalog.learn({"f": {0: ranges(1, 5, 9)}})
    [after] = catalog.view().tables
    assert after.order.at.tolist() == [0]
    assert len(after.unknown) == 0


def test_the_order_is_by_source_then_offset_and_leaves_unknown_ones_out() -> None:
    entries = np.zeros(5, dtype=ENTRY)
    entries["source"] = [2, 1, ANY, 1, 1]
    entries["first"] = [0, 50, 0, 10, 60]
    entries["last"] = [9, 99, 1 << 62, 20, 70]
    order = Table(entries).order

    assert order.at.tolist() == [3, 1, 4, 0]
    offsets = np.uint64((1 << 48) - 1)
    assert (order.begins & offsets).tolist() == [10, 50, 60, 0]
    assert (order.ends & offsets).tolist() == [20, 99, 99, 9]
