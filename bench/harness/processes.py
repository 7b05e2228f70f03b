"""Memory and CPU time of processes, from /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from duemq_server.local_cluster import EmbeddedCluster

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
        self._begin = {name: usage(pid) for name, pid in self._pids.items()}

    def us_per(self, count: int) -> dict[str, float]:
        """Microseconds a message, of each process that used any."""
        return self.figures(count)["cpu_us_per_msg"]

    def figures(self, count: int) -> dict[str, dict[str, float]]:
        """A message's CPU time, the kernel's part of it, and how often a thread had to wait.

        Of each process that used any.
        """
        used = {name: usage(pid) - self._begin[name] for name, pid in self._pids.items()}
        busy = {name: each for name, each in used.items() if each.cpu_s > 0}
        return {
            "cpu_us_per_msg": {n: round(u.cpu_s * 1e6 / count, 2) for n, u in busy.items()},
            "system_us_per_msg": {n: round(u.system_s * 1e6 / count, 2) for n, u in busy.items()},
            "waits_per_msg": {n: round(u.waits / count, 3) for n, u in busy.items()},
        }


@dataclass(frozen=True)
class Usage:
    """Of all threads of a process, since its start."""

    user_s: float
    system_s: float
    waits: int
    """Voluntary context switches: a thread found nothing to do, or waited for another."""

    @property
    def cpu_s(self) -> float:
        """User and system time."""
        return self.user_s + self.system_s

    def __sub__(self, before: Usage) -> Usage:
        return Usage(
            self.user_s - before.user_s,
            self.system_s - before.system_s,
            # Threads that ended in between took their counts along.
            max(0, self.waits - before.waits),
        )


def rss_mb(pid: int) -> float:
    """Resident memory, in MB of 10^6 bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return round(pages * _PAGE_BYTES / 1e6, 1)


def rss_peak_mb(pid: int) -> float:
    """The most that was resident since the process began, in MB of 10^6 bytes."""
    for line in (
        Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    ):
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return round(int(value.split()[0]) * 1024 / 1e6, 1)
    return 0.0


def read_bytes(pid: int) -> int:
    """Bytes that the process has asked the kernel for, from files and connections."""
    for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "rchar":
            return int(value)
    return 0


def cpu_s(pid: int) -> float:
    """CPU time used so far, by all threads, in user and system mode."""
    return usage(pid).cpu_s


def usage(pid: int) -> Usage:
    """CPU time and waits so far."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    fields = stat.rpartition(")")[2].split()
    waits = sum(map(_waits, Path(f"/proc/{pid}/task").glob("*/status")))
    return Usage(int(fields[_UTIME]) / _TICKS_PER_S, int(fields[_STIME]) / _TICKS_PER_S, waits)


def _waits(status: Path) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "voluntary_ctxt_switches":
                return int(value)
    return 0
