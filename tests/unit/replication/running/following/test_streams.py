"""Whom a replica follows, and what it says when it cannot."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from duemq.errors import Corrupt
from duemq_server.replication.protocol.messages import NeedsSnapshot
from duemq_server.replication.protocol.record import ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running import snapshots
from duemq_server.replication.running.following.streams import Streams
from duemq_server.storage.errors import DiskFull


class Candidate:
    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self.ended = 0
        self.followed = False

    def note(self, role: str, reason: str) -> None:
        self.notes.append((role, reason))

    def left(self, *, followed: bool) -> None:
        self.ended += 1
        self.followed = followed


class Following:
    """Its truncation fails: it finds no space for what it keeps aside, say."""

    followed = False

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def run(self, *_: Any) -> None:
        raise self.error


async def test_who_has_no_space_for_a_truncation_says_so_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It tries each second."""
    candidate, copy, follower = Candidate(), SimpleNamespace(committed=0), SimpleNamespace()
    follower.committed = 600
    me = ReplicaId("b", "b" * 32)
    streams = Streams(me, copy, Times(), "h:1", candidate, None)  # type: ignore[arg-type]
    full = DiskFull("write /data/log/0.broken-640: no space left")
    await streams._run(Following(full), follower, "h:2")  # type: ignore[arg-type]
    assert candidate.notes == [("joining", "write /data/log/0.broken-640: no space left")]
    assert (candidate.ended, candidate.followed, copy.committed) == (1, False, 600)
    assert not caplog.records


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no such sector"), Corrupt("a queue")])
async def test_who_cannot_read_what_it_has_says_so(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would go on being called in sync, and ready.  It tries each second."""
    candidate, copy = Candidate(), SimpleNamespace(committed=0)
    me = ReplicaId("b", "b" * 32)
    streams = Streams(me, copy, Times(), "h:1", candidate, None)  # type: ignore[arg-type]
    for _ in range(2):
        await streams._run(Following(error), copy, "h:2")  # type: ignore[arg-type]
    assert candidate.notes == [("joining", f"{type(error).__name__}: {error}")] * 2
    assert len(caplog.records) == 1


class Copy:
    """Its log was committed to 1000; the snapshot's begins at 800."""

    committed = 1000
    state = SimpleNamespace(receive=lambda: None)

    async def install(self, arriving: None, log_start: int, store_id: int) -> None:
        self.committed = log_start


class Behind:
    """The leader's log begins beyond what both have in common."""

    followed = False

    async def run(self, *_: Any) -> NeedsSnapshot:
        return NeedsSnapshot(7, ReplicaId("a", "a" * 32), 800)


async def test_after_an_accepted_loss_a_snapshot_holds_less_than_was_committed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the leader would have less in common with its log than is committed, for ever."""

    async def fetch(*_: Any) -> int:
        return 800

    monkeypatch.setattr(snapshots, "fetch", fetch)
    candidate, copy = Candidate(), Copy()
    record = SimpleNamespace(leader=None, store_id=7)
    follower = SimpleNamespace(committed=copy.committed, record=record)
    me = ReplicaId("b", "b" * 32)
    streams = Streams(me, copy, Times(), "h:1", candidate, None)  # type: ignore[arg-type]
    await streams._run(Behind(), follower, "h:2")  # type: ignore[arg-type]
    assert copy.committed == 800
