"""Whom a replica follows, and what it says when it cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from duemq_server.replication.protocol.record import ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running.following.streams import Streams
from duemq_server.storage.errors import DiskFull


class Candidate:
    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self.ended = 0

    def note(self, role: str, reason: str) -> None:
        self.notes.append((role, reason))

    def left(self) -> None:
        self.ended += 1


class Following:
    """Its truncation finds no space for what it keeps aside."""

    welcomed = False

    async def run(self, *_: Any) -> None:
        raise DiskFull("write /data/log/0.broken-640: no space left")


async def test_who_has_no_space_for_a_truncation_says_so_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It tries each second."""
    candidate, copy, follower = Candidate(), SimpleNamespace(committed=0), SimpleNamespace()
    follower.committed = 600
    me = ReplicaId("b", "b" * 32)
    streams = Streams(me, copy, Times(), "h:1", candidate, None)  # type: ignore[arg-type]
    await streams._run(Following(), follower, "h:2")  # type: ignore[arg-type]
    assert candidate.notes == [("joining", "write /data/log/0.broken-640: no space left")]
    assert (candidate.ended, copy.committed) == (1, 600)
    assert not caplog.records
