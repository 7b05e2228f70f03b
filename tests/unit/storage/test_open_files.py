"""Files that are removed while somebody opens them: their space is free when nobody reads any more,
and not when 512 others were opened since."""

from collections.abc import Callable

import pytest

from duemq_server.broker.store.queues import QueueTable
from duemq_server.broker.store.topics import Topic
from duemq_server.storage.indexes import consume_queue
from duemq_server.storage.indexes.index import FixedIndex
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.open_files import OpenFiles
from tests.crash.faulty_disk import FaultyDisk


class BusyDisk(FaultyDisk):
    """A reader opens each file just before it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.files = OpenFiles(self)
        self.removed: list[str] = []

    def unlink(self, path: str) -> None:
        self.files.get(path)
        super().unlink(path)
        self.removed.append(path)


def segments(disk: BusyDisk) -> None:
    log = SegmentedLog.open("/log", disk, segment_bytes=500, files=disk.files)
    assert list(log.recover()) == []
    for _ in range(20):
        log.append(1, [bytes(100)])
    while log.write_pending():
        pass
    log.delete_before(log.end_position)


def parts_of_an_index(disk: BusyDisk) -> None:
    index = FixedIndex("/index", disk, 8, files=disk.files, file_bytes=80)
    index.append(bytes(35 * 8))
    index.flush()
    index.drop_before(20)
    index.remove_before(20)


def a_topic(disk: BusyDisk) -> None:
    table = QueueTable("/data", disk, disk.files)
    topic = Topic("orders", 1, queues=2)
    for queue in table.add(topic):
        queue.append(bytes(consume_queue.ENTRY_BYTES))
        queue.sync()
    table.remove(topic)
    for folder in table.unknown_folders([]):
        table.erase(folder)


@pytest.mark.parametrize("remove", [segments, parts_of_an_index, a_topic])
def test_what_was_removed_does_not_stay_open(remove: Callable[[BusyDisk], None]) -> None:
    disk = BusyDisk()
    remove(disk)
    assert len(disk.removed) > 1
    for path in disk.removed:
        with pytest.raises(FileNotFoundError):
            disk.files.get(path)
