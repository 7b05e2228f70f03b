"""What the first touch of memory costs: writing to the page cache, new pages and used ones.

    python tests/bench/fresh_memory.py [DIRECTORY]

A virtual machine whose hypervisor takes free memory back ("free page reporting") pays for each
page that the page cache takes for the first time; then a log's writer spends most of its CPU time
in the copy, and the plain loop that is a benchmark's floor does so, too.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile

CHUNK = os.urandom(512 << 10)
CHUNKS = 400


def written_us_per_kib(fd: int) -> float:
    """CPU time in the kernel of writing CHUNKS chunks from the file's beginning."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    for number in range(CHUNKS):
        os.pwrite(fd, CHUNK, number * len(CHUNK))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_stime - before
    return used * 1e6 / (CHUNKS * len(CHUNK) / 1024)


def main(directory: str | None) -> None:
    """Prints microseconds a KiB."""
    for name in ("memory as it comes", "memory that the run before had"):
        with tempfile.TemporaryFile(dir=directory) as file:
            print(f"appending, {name}: {written_us_per_kib(file.fileno()):.2f} us a KiB")
            print(f"overwriting the same pages: {written_us_per_kib(file.fileno()):.2f} us a KiB")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
