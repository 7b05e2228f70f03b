"""The cluster that a benchmark measures: its own, or the one it was told."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from duemq import Admin
from duemq.errors import (
    DuemqError,
    GroupNotFound,
    InvalidArgument,
    PartialAnswer,
    Timeout,
    TopicNotFound,
)
from duemq_server.local_cluster import EmbeddedCluster

QUEUES_DEFAULT = 4
# Brokers may have more delayed messages than timer shards have taken over by the end.
TAKEN_OVER_S = 60
POLL_S = 0.2


@dataclass(frozen=True)
class Target:
    """Where to send to.  `cluster` is None when it is not ours."""

    nameserver: str
    directory: Path
    cluster: EmbeddedCluster | None = None
    topics: list[str] = field(default_factory=list)
    """Those that were made, or may have been."""

    def new_topic(self, purpose: str, queues: int = QUEUES_DEFAULT) -> str:
        """A fresh topic, so that runs do not see one another's messages."""
        name = f"bench-{purpose}-{secrets.token_hex(4)}"
        self.topics.append(name)
        with Admin(self.nameserver) as admin:
            admin.create_topic(name, queues=queues)
        return name

    def new_spread_topic(self, purpose: str, queues: int) -> str:
        """A fresh topic with so many queues in total, or a few more, on all brokers."""
        with Admin(self.nameserver) as admin:
            brokers = len(admin.cluster().brokers)
        return self.new_topic(purpose, -(-queues // max(1, brokers)))


def group_of(topic: str) -> str:
    """The group that reads a benchmark's topic."""
    return f"{topic}-group"


@contextmanager
def target(
    nameserver: str | None,
    *,
    directory: str | None = None,
    brokers: int = 1,
    replicas: int = 1,
    flags: Mapping[str, Sequence[str]] | None = None,
    keep_topics: bool = False,
    tell_left: Callable[[str], None] = lambda text: None,
) -> Iterator[Target]:
    """The cluster at `nameserver`; None: one of our own, with its data in a folder that goes.

    From a cluster that is not ours the topics that were made are taken away, unless they are to be
    kept; `tell_left` is told which could not be.
    """
    if directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="duemq-bench-", dir=directory) as scratch:
        if nameserver is not None:
            found = Target(nameserver, Path(scratch))
            try:
                yield found
            finally:  # also after Ctrl-C: nobody else knows what is ours
                if found.topics and not keep_topics:
                    _remove(nameserver, found.topics, tell_left)
            return
        with EmbeddedCluster(
            Path(scratch) / "cluster", brokers=brokers, replicas=replicas, flags=flags
        ) as cluster:
            yield Target(cluster.nameserver, Path(scratch), cluster)


def _remove(nameserver: str, topics: Sequence[str], tell_left: Callable[[str], None]) -> None:
    left = dict.fromkeys(topics, "interrupted")
    try:
        with Admin(nameserver) as admin:
            for topic in topics:
                try:
                    _remove_one(admin, topic)
                    del left[topic]
                except DuemqError as error:
                    left[topic] = str(error)
    except DuemqError as error:
        left = dict.fromkeys(topics, str(error))
    finally:
        for topic, reason in left.items():
            tell_left(f"topic {topic} or its group is left: {reason}")


def _remove_one(admin: Admin, topic: str) -> None:
    """With its delayed messages, which would wait for it for ever, and the group that read it."""
    # Of what waits at brokers nobody knows whose it is.
    if _count(admin, topic, "accepted") or any(each.waiting for each in admin.timer_owners()):
        _wait_taken_over(admin)
        if _count(admin, topic, "pending"):
            admin.cancel_pending(topic)
    with suppress(TopicNotFound):
        admin.delete_topic(topic)
    with suppress(GroupNotFound):
        admin.delete_group(group_of(topic))


def _count(admin: Admin, topic: str, what: str) -> int:
    """Of its delayed messages; 1: nobody knows."""
    try:
        return sum(getattr(each, what) for each in admin.count_timers(topic))
    except InvalidArgument:  # counted with other topics
        return 1
    except PartialAnswer:
        if any(each.id for each in admin.timer_owners()):
            raise  # who is away may have some
        return 0  # there is no timer service


def _wait_taken_over(admin: Admin) -> None:
    """Until timer shards have what brokers had: they cancel no other.  Raises Timeout."""
    deadline = time.monotonic() + TAKEN_OVER_S
    ends: dict[tuple[str, int | None], int] = {}
    while True:
        owned = {(each.broker, each.queue_id): each for each in admin.timer_owners() if each.id}
        ends = ends or {place: each.taken_over + each.waiting for place, each in owned.items()}
        if all(each.taken_over >= ends.get(place, 0) for place, each in owned.items()):
            return
        if time.monotonic() > deadline:
            raise Timeout(f"brokers have delayed messages for timer shards after {TAKEN_OVER_S} s")
        time.sleep(POLL_S)
