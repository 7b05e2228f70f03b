"""The folder of an embedded cluster.

    DIR/cluster.json     names and ports of the members: clients and brokers may hold the addresses;
                         how many replicas each has
    DIR/lock             held (flock) by the supervisor as long as it lives
    DIR/metrics.json     Prometheus targets (file_sd_configs), where it was started with metrics
    DIR/<member>/        the data of a broker or timer service; with replicas DIR/broker-0/a/ …
    DIR/leases/          which replica leads each group (duemq_server.replication.stores.file)
    DIR/logs/<member>.log   what the member logs; before that .log.1 to .log.4 (log_files.py)

A port is held as long as the cluster runs, also while its member does not: nobody else gets it.
While the cluster is stopped somebody may take it.  The socket that holds it lets our member listen,
and would let another cluster hold the same port: a mark tells that one (Linux only).  Of two that
begin at once, on one address and on every one, neither may get it.

Owned by: `EmbeddedCluster`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from string import ascii_lowercase

from duemq.errors import InvalidArgument
from duemq_server.serving.settings import WILDCARDS

VERSION = 1
# Of a folder with replicas: releases that know of none must not start on it.
VERSION_REPLICATED = 2
PORT_MAX = 65_535


class Layout:
    """Names, ports and paths of the members of one cluster."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.replicas = 1
        """Of each broker and timer service; written down with the next port."""
        self._ports: dict[str, int] = {}
        self._held: list[socket.socket] = []
        self._lock: int | None = None

    def open(self) -> None:
        """Makes the folder, takes its lock and reads what is known.

        Raises InvalidArgument when another cluster runs in the folder or its file is not ours.
        """
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the ports and the lock back."""
        for held in self._held:
            held.close()
        self._held.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def groups(self, kind: str) -> list[str]:
        """The known members of a kind, a group of replicas as one, in order."""
        known = {name.partition("/")[0] for name in self._ports if name.startswith(f"{kind}-")}
        # What has data counts, too: cluster.json may be lost, or a full disk have kept it short.
        data = {each.name for each in self.directory.glob(f"{kind}-*") if each.is_dir()}
        known |= {name for name in data if name.removeprefix(f"{kind}-").isdecimal()}
        return sorted(known, key=lambda name: int(name.rsplit("-", 1)[1]))

    @property
    def leases(self) -> Path:
        """Where groups of replicas note who leads."""
        return self.directory / "leases"

    def port(self, member: str) -> int:
        """The member's port of last time; 0: it has none yet."""
        return self._ports.get(member, 0)

    def hold(self, port: int, host: str = "127.0.0.1") -> int:
        """Keeps a port of this machine, 0 for any that is free, from everybody but the members.

        Raises OSError when it is taken.
        """
        held = bind_port(port, host)
        self._held.append(held)
        address, number = held.getsockname()[:2]
        try:
            self._held += _marks(address, number)
        except OSError:
            self._held.remove(held)
            held.close()
            raise
        return int(number)

    def remember(self, member: str, port: int) -> None:
        """Writes a member's port down for the next start."""
        if self._ports.get(member) == port:
            return
        self._ports[member] = port
        content: dict[str, object] = {"version": VERSION, "ports": self._ports}
        if self.replicas > 1:
            content |= {"version": VERSION_REPLICATED, "replicas": self.replicas}
        _write(self.directory / "cluster.json", content)

    def write_targets(self, targets: Mapping[str, str]) -> None:
        """Tells Prometheus where each member's metrics are; without any, no more."""
        path = self.directory / "metrics.json"
        if not targets:
            path.unlink(missing_ok=True)
            return
        groups = [
            {"targets": [address], "labels": {"job": "duemq", "member": member}}
            for member, address in targets.items()
        ]
        _write(path, groups)

    def data_dir(self, member: str) -> Path:
        """Where the member keeps its data."""
        return self.directory / member

    def log_file(self, member: str) -> Path:
        """Where the member's log goes; its folder is there."""
        path = self.directory / "logs" / f"{member}.log"
        path.parent.mkdir(exist_ok=True)
        return path

    def _take_lock(self) -> None:
        lock = os.open(self.directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise InvalidArgument(
                f"another cluster runs in {self.directory}; stop it or choose another folder",
                field="data",
                value=str(self.directory),
            ) from None
        self._lock = lock

    def _read(self) -> None:
        path = self.directory / "cluster.json"
        self.replicas = self._replicas_with_data()
        with contextlib.suppress(FileNotFoundError):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                if content["version"] not in (VERSION, VERSION_REPLICATED):
                    known = f"{VERSION} and {VERSION_REPLICATED}"
                    raise ValueError(f"version {content['version']}, known are {known}")
                self.replicas = int(content.get("replicas", self.replicas))
                self._ports = {str(k): _port(v) for k, v in content["ports"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidArgument(
                    f"{path} is not a cluster file of DueMQ: {error}", field="data", value=str(path)
                ) from error

    def _replicas_with_data(self) -> int:
        """Of the group that has most; 1: there are none."""
        folders = (self.directory / group for group in self.groups("broker"))
        return max(map(_replicas_in, folders), default=1)


def _port(value: object) -> int:
    port = int(str(value))
    if not 0 <= port <= PORT_MAX:
        raise ValueError(f"port {port}, known are 0 to {PORT_MAX}")
    return port


def _write(path: Path, content: object) -> None:
    """In place of what is there, on disk before: a power failure leaves the one or the other."""
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _replicas_in(folder: Path) -> int:
    """They are called by letters, from a on: the last one tells, others may have lost theirs."""
    names = [name for name in ascii_lowercase if (folder / name).is_dir()]
    return ascii_lowercase.index(names[-1]) + 1 if names else 1


def _marks(address: str, port: int) -> list[socket.socket]:
    """That a cluster holds the port, as a name of the kernel's which ends with the process.

    Raises OSError when another one holds it; none where such names may not be had.
    """
    if sys.platform != "linux":
        return []
    mark = None
    try:
        mark = socket.socket(socket.AF_UNIX)
        mark.bind(f"\0duemq/{address}/{port}")
        if _overlaps(address, port):  # looked for behind our own mark: one of two sees the other's
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    except OSError as error:
        if mark is not None:
            mark.close()
        if error.errno == errno.EADDRINUSE:
            raise
        return []  # a sandbox forbids them: the port is held all the same
    return [mark]


def _overlaps(address: str, port: int) -> bool:
    """Whether another cluster has marked the port, it or this one for every address."""
    try:
        marks = Path("/proc/net/unix").read_text(errors="replace")
    except OSError:  # a sandbox hides it
        return False
    others = {*re.findall(rf"@duemq/([^/\s]+)/{port}$", marks, re.MULTILINE)} - {address}
    return bool(others) and (address in WILDCARDS or not others.isdisjoint(WILDCARDS))


def bind_port(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A socket that has a port of this machine, 0 for any, and lets a service of ours listen there.

    It does not listen.  Raises OSError when the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:  # connections of a killed predecessor in TIME_WAIT do not count
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held
