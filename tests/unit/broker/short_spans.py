"""The key index with spans of a few records, and what the broker's loops do for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from duemq_server.broker.store import recovery
from duemq_server.broker.store.keys import key_index
from duemq_server.broker.store.keys.key_builder import KeyBuilder
from duemq_server.broker.store.store import Store
from duemq_server.storage.disk import Disk
from tests.unit.broker.reading.test_lookup import settle

SPAN = 8
DATA = "/data"


@contextmanager
def short_spans() -> Iterator[None]:
    """Queues that are made meanwhile have them."""
    with mock.patch.object(key_index, "SPAN_RECORDS", SPAN):
        yield


def save(store: Store, disk: Disk) -> None:
    """A checkpoint, and all runs that it allows."""
    state = store.freeze()()
    settle(store)
    queues = store.all_queues()
    for queue in queues:
        queue.sync()
    recovery.save_checkpoint(DATA, state, disk)
    store.tables.erase_deleted(state)
    builder = KeyBuilder(DATA, disk)
    while (plan := builder.plan(queues, state.queues)).missing:
        for span in plan.spans:
            assert builder.build(span)


def runs_of(disk: Disk, topic: str) -> list[str]:
    """The files of the runs of a topic."""
    return [path for path in disk.paths if path.endswith(".keys") and f"/{topic}." in path]
