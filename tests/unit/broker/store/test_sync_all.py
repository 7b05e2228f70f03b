"""A checkpoint is of queues that are all on the disk, or there is none."""

import pytest

from duemq_server.broker.store.queues import sync_all
from duemq_server.storage.errors import DiskFailed


class Queue:
    """Notes its syncs; one that is broken fails in them."""

    def __init__(self, *, dirty: bool = True, broken: bool = False) -> None:
        self.dirty = dirty
        self.broken = broken
        self.syncs = 0

    def sync(self) -> None:
        self.syncs += 1
        if self.broken:
            raise DiskFailed("the disk is gone")


def test_only_what_changed_is_synced() -> None:
    queues = [Queue(dirty=number % 3 == 0) for number in range(40)]
    sync_all(queues)
    assert [queue.syncs for queue in queues] == [int(queue.dirty) for queue in queues]


def test_one_failed_sync_fails_all() -> None:
    queues = [Queue(broken=number == 7) for number in range(40)]
    with pytest.raises(DiskFailed):
        sync_all(queues)
