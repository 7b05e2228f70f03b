"""Key run: the key hashes of a span of a consume queue, sorted: a key is found by two reads.

A file a span, named by the 20-digit queue offset of the span's first record and `.keys`; nothing in
it ever changes.  Little-endian.

off   size  field      meaning
 0     4    crc32c     CRC-32C of bytes [4, 32 + 8 * pages)
 4     4    magic      "DMQK"
 8     2    version    1
10     2    reserved   zeros
12     4    span       records of the span, with and without a key
16     8    base       queue offset of the span's first record
24     4    count      entries: one for each record that has a key
28     4    reserved   zeros
32    8*p   fences     the first entry of each page; p is count / 1,023, rounded up
4096   …    pages      8,192 bytes each, the last one as many as it needs; none if count is 0

off   size  field      of a page
 0     4    crc32c     CRC-32C of the rest of the page
 4     4    number     which page it is, from 0
 8    8*n   entries    in the upper 32 bits the key hash, in the lower ones the offset from base

Entries ascend, so those of one hash lie together, in the order of their offsets.

Derived from the consume queue, which is derived from the log.  Whoever meets damage builds it anew.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import google_crc32c
import numpy as np

from duemq_server.storage.disk import Buffer, Disk, DiskFile, write_all
from duemq_server.storage.errors import CorruptFile, UnknownVersion
from duemq_server.storage.indexes.index import NAME_DIGITS

HEADER = struct.Struct("<I4sH2xIQI4x")
assert HEADER.size == 32
MAGIC = b"DMQK"
VERSION = 1
SUFFIX = ".keys"
ENTRY_BYTES = 8
PAGES_AT = 4096
PAGE_BYTES = 8192
PAGE_ENTRIES = PAGE_BYTES // ENTRY_BYTES - 1
SPAN_MAX = (PAGES_AT - HEADER.size) // ENTRY_BYTES * PAGE_ENTRIES
"""Records of a span at most: so many that its fences fit before the pages."""

Entries: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint64]]"

_HASH_SHIFT = np.uint64(32)
_OFFSET_MASK = np.uint64(0xFFFFFFFF)
_REMEDY = "It is derived data: remove it, or leave it to the broker, which builds it anew"


def name_of(base: int) -> str:
    """The name of the file of a span."""
    return f"{base:0{NAME_DIGITS}d}{SUFFIX}"


def base_of(name: str) -> int | None:
    """The span that a file is of; None: it is no key run."""
    digits = name.removesuffix(SUFFIX)
    whole = digits != name and len(digits) == NAME_DIGITS and digits.isdigit()
    return int(digits) if whole else None


def is_name(name: str) -> bool:
    """Whether it names the file of a span."""
    return base_of(name) is not None


def entries_of(key_hashes: np.ndarray[tuple[int], np.dtype[np.uint32]], first: int) -> Entries:
    """Entries of the records that have a key; `first`: the first record's offset from base."""
    keyed = np.flatnonzero(key_hashes)
    hashes = key_hashes[keyed].astype(np.uint64)
    return (hashes << _HASH_SHIFT) | (keyed + first).astype(np.uint64)


def offsets_of(entries: Entries) -> Entries:
    """Their offsets from base."""
    return entries & _OFFSET_MASK


def hashes_of(entries: Entries) -> Entries:
    """Their key hashes."""
    return entries >> _HASH_SHIFT


def encode(base: int, span: int, pieces: Sequence[Entries]) -> list[Buffer]:
    """The file's bytes, of entries in any order."""
    if not 0 < span <= SPAN_MAX:
        raise ValueError(f"a span of {span} records is not 1 to {SPAN_MAX}")
    entries = np.sort(np.concatenate([*pieces, np.empty(0, np.uint64)]))
    count = len(entries)
    pages = _pages_of(count)
    fences = entries[::PAGE_ENTRIES].astype("<u8").tobytes()
    covered = HEADER.pack(0, MAGIC, VERSION, span, base, count)[4:] + fences
    head = google_crc32c.value(covered).to_bytes(4, "little") + covered
    if not count:
        return [head]
    body = np.zeros((pages, PAGE_ENTRIES + 1), "<u8")
    padded = np.zeros(pages * PAGE_ENTRIES, np.uint64)
    padded[:count] = entries
    body[:, 0] = np.arange(pages, dtype=np.uint64) << _HASH_SHIFT
    body[:, 1:] = padded.reshape(pages, PAGE_ENTRIES)
    data = body.data.cast("B")[: (count + pages) * ENTRY_BYTES]
    for number in range(pages):
        page = data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
        page[:4] = google_crc32c.value(bytes(page[4:])).to_bytes(4, "little")
    return [head.ljust(PAGES_AT, b"\0"), data]


def _pages_of(count: int) -> int:
    return -(-count // PAGE_ENTRIES)


def write(path: str, buffers: Sequence[Buffer], disk: Disk) -> None:
    """Writes and syncs a file that is to be renamed.  Raises DiskFull, DiskFailed."""
    file = disk.open(path, create=True)
    try:
        file.truncate(write_all(file, buffers, 0))
        file.fdatasync()
    finally:
        file.close()


class KeyRun:
    """An open run.  Raises CorruptFile, UnknownVersion, OSError, here and when read."""

    __slots__ = ("_fences", "_file", "base", "count", "path", "span")

    def __init__(self, file: DiskFile, path: str) -> None:
        self._file = file
        self.path = path
        head = file.pread(PAGES_AT, 0)
        if len(head) < HEADER.size:
            raise self._corrupt(0, f"only {len(head)} bytes")
        crc, magic, version, self.span, self.base, self.count = HEADER.unpack_from(head)
        if magic != MAGIC:
            raise self._corrupt(4, "the magic is wrong")
        if version != VERSION:
            raise UnknownVersion(f"{path} has version {version}, this release reads {VERSION}")
        end = HEADER.size + _pages_of(self.count) * ENTRY_BYTES
        if end > len(head) or google_crc32c.value(bytes(head[4:end])) != crc:
            raise self._corrupt(0, "the CRC-32C of the header is wrong")
        self._fences = np.frombuffer(head[HEADER.size : end], "<u8")

    def check_span(self, base: int, span: int) -> None:
        """Raises CorruptFile unless it is the run of that span."""
        if (self.base, self.span) != (base, span):
            raise self._corrupt(12, f"it is of {self.span} records from {self.base} on")

    def find(self, key_hash: int, low: int, high: int, limit: int) -> list[int]:
        """Ascending queue offsets of records with a key of that hash, `limit` at most.

        `low` to `high`: where in the queue, `high` not included; both within the span.
        """
        first = np.uint64(key_hash << 32 | low - self.base)
        past = np.uint64((key_hash << 32) + high - self.base)
        begin = max(0, int(np.searchsorted(self._fences, first, side="right")) - 1)
        end = int(np.searchsorted(self._fences, past))
        found: list[int] = []
        for number in range(begin, end):
            page = self.page(number)
            here = page[np.searchsorted(page, first) : np.searchsorted(page, past)]
            found += (offsets_of(here) + np.uint64(self.base)).tolist()
            if len(found) >= limit:
                break
        return found[:limit]

    def page(self, number: int) -> Entries:
        """The entries of a page."""
        offset = PAGES_AT + number * PAGE_BYTES
        size = (min(PAGE_ENTRIES, self.count - number * PAGE_ENTRIES) + 1) * ENTRY_BYTES
        data = self._file.pread(size, offset)
        if len(data) < size:
            raise self._corrupt(offset + len(data), "pages are missing")
        crc, said = struct.unpack_from("<II", data)
        if said != number or google_crc32c.value(bytes(data[4:])) != crc:
            raise self._corrupt(offset, f"the CRC-32C of page {number} is wrong")
        return np.frombuffer(data[8:], "<u8")

    def entries(self) -> Entries:
        """All of them."""
        pages = [self.page(number) for number in range(_pages_of(self.count))]
        return np.concatenate([*pages, np.empty(0, np.uint64)])

    def _corrupt(self, offset: int, problem: str) -> CorruptFile:
        return CorruptFile(self.path, offset, problem, _REMEDY)
