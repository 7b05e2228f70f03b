"""A file of a disk with bad sectors: what cannot be read is zeros, for who looks for damage.

So damage of that kind is found, given up and kept aside like any other.  Whoever writes over all of
a page gets a good one in its place.
"""

from __future__ import annotations

import errno

from duemq_server.storage.disk import ReadableFile

PAGE_BYTES = 4_096
"""What a system reads at once: with one sector all of it is lost."""


class WornFile:
    """Implements ReadableFile."""

    def __init__(self, file: ReadableFile) -> None:
        self._file = file
        self.unread: set[int] = set()
        """Offsets of the pages that could not be read."""

    def pread(self, length: int, offset: int, nowait: bool = False) -> memoryview:
        """See ReadableFile."""
        first = offset - offset % PAGE_BYTES
        if self.unread.isdisjoint(range(first, offset + length, PAGE_BYTES)):
            try:
                return self._file.pread(length, offset, nowait)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
        end = min(offset + length, self._file.size())
        pages = [
            self._page(page, max(page, offset), min(page + PAGE_BYTES, end))
            for page in range(first, end, PAGE_BYTES)
        ]
        return memoryview(b"".join(pages))

    def _page(self, page: int, start: int, end: int) -> bytes:
        """What lies between two offsets of it; once it could not be read all of it is lost."""
        if page not in self.unread:
            try:
                return bytes(self._file.pread(end - start, start))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
            self.unread.add(page)
        return bytes(end - start)

    def size(self) -> int:
        """See ReadableFile."""
        return self._file.size()
