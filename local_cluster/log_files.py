"""A member's log: so many files of a bounded size, of which the process itself begins the next.

    <member>.log      what it writes now
    <member>.log.1    what was before that, up to .4; the oldest goes

The process writes to its standard error, gRPC's own lines among it.  Which file that is changes in
one step (dup2), so that no line is lost and none is cut, as they would be if another process cut
the file; and a line is never waited for, as it would be if it went through a pipe.
"""

from __future__ import annotations

import os

# A busy broker logs a few hundred lines an hour; what fills this is an outage that lasts for days.
LOG_BYTES_MAX = 16 << 20
LOGS_BEFORE = 4
"""Files beside the one that is written to."""


def turn_over(path: str, fd: int) -> bool:
    """Begins the next file, and makes `fd` that one, if the file at `path` is full.

    Raises OSError, as on a full disk: `fd` is as it was.
    """
    if os.fstat(fd).st_size < LOG_BYTES_MAX:
        return False
    new = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        for number in range(LOGS_BEFORE, 0, -1):
            older = f"{path}.{number - 1}" if number > 1 else path
            if os.path.exists(older):
                os.replace(older, f"{path}.{number}")
        os.replace(f"{path}.new", path)
        os.dup2(new, fd)
    finally:
        os.close(new)
    return True
