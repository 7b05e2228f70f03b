"""Memory and CPU time of processes, from /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from duemq.embedded import EmbeddedCluster

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the command's name, which may hold blanks: utime, stime.
_UTIME, _STIME = 11, 12


class CpuMeter:
    """CPU time of this process and of the cluster's, from its making on.

    On a machine with other work to do it says more than the clock.
    """

    def __init__(
        self, cluster: EmbeddedCluster | None, others: Mapping[str, int] | None = None
    ) -> None:
        """`others`: more process ids, by name."""
        processes = cluster.processes if cluster else {}
        self._pids = {"client": os.getpid(), **processes, **(others or {})}
        self._begin = {name: cpu_s(pid) for name, pid in self._pids.items()}

    def us_per(self, count: int) -> dict[str, float]:
        """Microseconds a message, of each process that used any."""
        used = {name: cpu_s(pid) - self._begin[name] for name, pid in self._pids.items()}
        return {name: round(s * 1e6 / count, 2) for name, s in used.items() if s > 0}


def rss_mb(pid: int) -> float:
    """Resident memory, in MB of 10^6 bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return round(pages * _PAGE_BYTES / 1e6, 1)


def read_bytes(pid: int) -> int:
    """Bytes that the process has asked the kernel for, from files and connections."""
    for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "rchar":
            return int(value)
    return 0


def cpu_s(pid: int) -> float:
    """CPU time used so far, by all threads, in user and system mode."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    fields = stat.rpartition(")")[2].split()
    return (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
