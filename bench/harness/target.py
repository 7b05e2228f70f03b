"""The cluster that a benchmark measures: its own, or the one it was told."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from duemq import Admin
from duemq_server.local_cluster import EmbeddedCluster

QUEUES_DEFAULT = 4


@dataclass(frozen=True)
class Target:
    """Where to send to.  `cluster` is None when it is not ours."""

    nameserver: str
    directory: Path
    cluster: EmbeddedCluster | None = None

    def new_topic(self, purpose: str, queues: int = QUEUES_DEFAULT) -> str:
        """A fresh topic, so that runs do not see one another's messages."""
        name = f"bench-{purpose}-{secrets.token_hex(4)}"
        with Admin(self.nameserver) as admin:
            admin.create_topic(name, queues=queues)
        return name

    def new_spread_topic(self, purpose: str, queues: int) -> str:
        """A fresh topic with so many queues in total, or a few more, on all brokers."""
        with Admin(self.nameserver) as admin:
            brokers = len(admin.cluster().brokers)
        return self.new_topic(purpose, -(-queues // max(1, brokers)))


@contextmanager
def target(
    nameserver: str | None,
    *,
    directory: str | None = None,
    brokers: int = 1,
    replicas: int = 1,
    flags: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Target]:
    """The cluster at `nameserver`; None: one of our own, with its data in a folder that goes."""
    if directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="duemq-bench-", dir=directory) as scratch:
        if nameserver is not None:
            yield Target(nameserver, Path(scratch))
            return
        with EmbeddedCluster(
            Path(scratch) / "cluster", brokers=brokers, replicas=replicas, flags=flags
        ) as cluster:
            yield Target(cluster.nameserver, Path(scratch), cluster)
