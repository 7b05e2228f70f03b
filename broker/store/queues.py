"""The queues of topics: the consume queue of each, and where the next record goes.

Owned by: Tables.  Mutated by: the event loop.  Read by: any thread.

A queue's offsets: `min_offset` the oldest record kept, `max_offset` the end of what consumers may
see (it is durable, and its time has come), `next_offset` what the next append gets.  The difference
between the last two is on its way to the disk, or hidden for a moment (hidden.py).

Offsets of messages that the log has lost are never given again (recovery.py): they are a gap, which
who reads steps over (`present`).
"""

import os
from concurrent.futures import ThreadPoolExecutor

from duemq_server.broker.store.keys.key_index import KeyIndex
from duemq_server.broker.store.topics import Topic
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import CorruptFile
from duemq_server.storage.indexes import consume_queue, key_run
from duemq_server.storage.indexes.index import REMEDY, FixedIndex
from duemq_server.storage.open_files import OpenFiles

DIRECTORY = "consumequeue"
SYNC_THREADS = 16


class Queue:
    """One queue.  Its files come into being with its first records."""

    __slots__ = (
        "_hidden_from",
        "_index",
        "at_once_end",
        "dropped",
        "key",
        "keys",
        "next_offset",
        "queue_id",
        "topic",
        "topic_id",
    )

    def __init__(
        self, topic: Topic, queue_id: int, directory: str, disk: Disk, files: OpenFiles
    ) -> None:
        self.topic = topic.name
        self.topic_id = topic.id
        self.queue_id = queue_id
        # The topic was deleted: what is still on its way to the disk is not indexed any more.
        self.dropped = False
        self._hidden_from: int | None = None
        self._index = FixedIndex(directory, disk, consume_queue.ENTRY_BYTES, files=files)
        self.key = topic.name, queue_id
        """Topic and number."""
        self.keys = KeyIndex(directory, disk)
        self.next_offset = self.max_offset
        self.at_once_end = 0
        """Of %TIMER%: where the newest batch ends that a fetch is not to linger for."""

    @property
    def min_offset(self) -> int:
        """The oldest record kept."""
        return self._index.first

    @property
    def max_offset(self) -> int:
        """One past the newest record that consumers may see."""
        # Each is read once, and in this order: what is hidden may be shown meanwhile.
        end, hidden_from = self._index.end, self._hidden_from
        return end if hidden_from is None else min(end, hidden_from)

    def hide(self, offset: int | None) -> None:
        """Consumers see nothing from there on; None: they see all (hidden.py)."""
        self._hidden_from = offset

    def append(self, entries: bytes) -> None:
        """Records are durable: consumers see them, unless they are hidden.

        Raises DiskFull; then nothing was added.
        """
        self._index.append(entries)

    def hold(self, entries: bytes) -> None:
        """As `append`, at a start on a full disk: they wait in memory until there is space."""
        self._index.hold(entries)

    def present(self, offset: int) -> int:
        """The offset itself, or where the gap ends that it lies in."""
        return self._index.present(offset)

    def records_from(self, offset: int) -> int:
        """How many records that consumers may see there are from an offset on."""
        hidden = self._index.count(self.max_offset)
        return max(0, self._index.count(offset) - hidden)

    def page(self, offset: int, count: int, nowait: bool = False) -> memoryview:
        """Up to `count` entries from `offset` on, less only at `max_offset` or at a gap.

        Raises BlockingIOError with `nowait`, IndexError before `min_offset` and in a gap,
        CorruptFile, and FileNotFoundError of a topic that was deleted.
        """
        size = consume_queue.ENTRY_BYTES
        count = max(0, min(count, self.max_offset - offset))
        data = self._read(offset, count, nowait)
        while len(data) < count * size:
            got = len(data) // size
            if self.present(offset + got) != offset + got:
                break
            rest = self._read(offset + got, count - got, nowait)
            data = memoryview(b"".join((data, rest)))
        return data

    def _read(self, offset: int, count: int, nowait: bool) -> memoryview:
        try:
            return self._index.read(offset, count, nowait)
        except FileNotFoundError as error:
            if self.dropped:
                raise
            # Not retention, which would be an IndexError: whoever began anew would be here again.
            path = str(error.filename or error)
            raise CorruptFile(path, 0, "the file is gone", REMEDY) from error

    def entry(self, offset: int) -> tuple[int, ...]:
        """One entry: position, size, frame_back, tag hash, key hash, store_ms."""
        return consume_queue.ENTRY.unpack(self.page(offset, 1))

    def entry_from(self, offset: int) -> tuple[int, ...] | None:
        """The entry of an offset, or of the next one that is there; None: there is none yet."""
        offset = self.present(offset)
        return self.entry(offset) if offset < self.max_offset else None

    def frame_at(self, offset: int) -> int:
        """Log position of the frame that holds a record."""
        position, _, frame_back, *_ = self.entry(offset)
        return position - frame_back

    def last_frame(self) -> int:
        """Log position of the frame of the newest record; -1: there is none.

        Raises StorageError, OSError.
        """
        last = self._index.last_before(self.max_offset)
        return self.frame_at(last) if last >= self.min_offset else -1

    def last_store_ms(self) -> int:
        """When the newest record was stored that consumers may see; 0: there is none."""
        last = self._index.last_before(self.max_offset)
        return self.entry(last)[5] if last >= self.min_offset else 0

    @property
    def dirty(self) -> bool:
        """Whether `sync` has anything to do."""
        return self._index.dirty

    def sync(self) -> None:
        """Makes all of it durable; in any thread.  Raises DiskFull, DiskFailed."""
        self._index.sync()

    def rewind(self, offset: int) -> None:
        """Forgets what is beyond `offset`, at start.  Raises IndexError if that is out of reach."""
        if self._index.end >= self.keys.span:  # else there is no run: it would end beyond
            self.keys.load(self._index.first, offset)
        self._index.truncate(offset)
        self.next_offset = offset

    def restart(self, offset: int = 0) -> None:
        """Empties the queue, at start: its next record is that of `offset`."""
        self.keys.load(0, 0)
        self._index.reset(offset)
        self.next_offset = offset

    def skip_to(self, offset: int) -> None:
        """Leaves offsets out, at start: they were given to records that are lost."""
        self._index.skip_to(offset)
        self.next_offset = offset

    def first_from(self, position: int) -> int:
        """Offset of the first record that lies from a position of the log on.  Any thread.

        Raises StorageError, OSError.
        """
        low, high = self.min_offset, self.max_offset
        if low == high or self._lies_behind(low, position):
            return low
        while low < high:
            middle = (low + high) // 2
            if not self._lies_behind(middle, position):
                low = middle + 1
            else:
                high = middle
        return low

    def drop_before(self, offset: int) -> None:
        """Forgets the records before an offset; `free` removes their files."""
        self._index.drop_before(offset)
        self.keys.drop_before(self.min_offset)

    def free(self, offset: int) -> None:
        """Removes the files of records before an offset that was dropped.  Any thread.

        A start from the checkpoint before a purge would need them.
        """
        self._index.remove_before(offset)
        self.keys.remove_dropped()

    def _lies_behind(self, offset: int, position: int) -> bool:
        """Whether all from an offset on lies from a position of the log on."""
        entry = self.entry_from(offset)
        return entry is None or entry[0] >= position

    def drop(self) -> None:
        """The topic was deleted: nothing is written to the folder any more."""
        self.dropped = True
        self.keys.close()

    def close(self) -> None:
        """Closes the files."""
        self._index.close()


def sync_all(queues: list[Queue]) -> None:
    """Side by side: the file system joins syncs that it gets at once.

    Raises what the first sync raised that failed.
    """
    dirty = [queue for queue in queues if queue.dirty]
    with ThreadPoolExecutor(SYNC_THREADS, "checkpoint-sync") as threads:
        for _ in threads.map(lambda queue: queue.sync(), dirty):
            pass


def remove_key_runs(data_dir: str, disk: Disk) -> int:
    """Removes the key index of all queues; how many runs.  Before a start, which finds none then.

    Raises DiskFull, DiskFailed.
    """
    paths = [os.path.join(data_dir, DIRECTORY)]
    if not disk.exists(paths[0]):
        return 0
    for _ in ("topics", "queues", "files"):
        listed = [(path, _names_in(disk, path)) for path in paths]
        paths = [os.path.join(path, name) for path, names in listed for name in names or ()]
    runs = [path for path in paths if key_run.is_name(os.path.basename(path))]
    for path in runs:
        disk.unlink(path)
    return len(runs)


def _names_in(disk: Disk, path: str) -> list[str] | None:
    """None: a file lies there, which somebody has put between our folders."""
    try:
        return disk.listdir(path)
    except NotADirectoryError:
        return None


class QueueTable:
    """The queues of every topic of the broker."""

    def __init__(self, data_dir: str, disk: Disk, files: OpenFiles) -> None:
        self._root = os.path.join(data_dir, DIRECTORY)
        self._disk = disk
        self._files = files
        self._queues: dict[str, list[Queue]] = {}

    def add(self, topic: Topic) -> list[Queue]:
        """Makes the queues of a topic, or opens them."""
        queues = [self._open(topic, number) for number in range(topic.queues)]
        self._queues[topic.name] = queues
        return queues

    def grow(self, topic: Topic) -> None:
        """Makes the queues that the topic has more than before, empty."""
        queues = self._queues[topic.name]
        for number in range(len(queues), topic.queues):
            queue = self._open(topic, number)
            queue.restart()
            queues.append(queue)

    def _open(self, topic: Topic, number: int) -> Queue:
        directory = os.path.join(self._folder(topic), str(number))
        return Queue(topic, number, directory, self._disk, self._files)

    def of(self, topic: str) -> list[Queue]:
        """The queues of a topic that exists."""
        return self._queues[topic]

    def all(self) -> list[Queue]:
        """Every queue."""
        return [queue for queues in self._queues.values() for queue in queues]

    def remove(self, topic: Topic) -> None:
        """Forgets the queues of a topic; `erase` removes the files."""
        for queue in self._queues.pop(topic.name, []):
            queue.drop()

    def unknown_folders(self, topics: list[Topic]) -> list[str]:
        """Those of other topics than these."""
        if not self._disk.exists(self._root):
            return []
        known = set(map(_folder_name, topics))
        return [
            os.path.join(self._root, name)
            for name in self._disk.listdir(self._root)
            if name not in known
        ]

    def erase(self, folder: str) -> None:
        """Removes one of them; a file among them stays.  Any thread.

        Raises DiskFull, DiskFailed, OSError.
        """
        numbers = _names_in(self._disk, folder)
        if numbers is None:
            return
        for number in numbers:
            queue = os.path.join(folder, number)
            for name in self._disk.listdir(queue):
                path = os.path.join(queue, name)
                self._disk.unlink(path)
                self._files.forget(path)
            self._disk.rmdir(queue)
        self._disk.rmdir(folder)

    def _folder(self, topic: Topic) -> str:
        return os.path.join(self._root, _folder_name(topic))


def _folder_name(topic: Topic) -> str:
    # The id has no dot: names with dots share no folder.
    return f"{topic.name}.{topic.id}"
