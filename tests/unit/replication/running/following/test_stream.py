"""A follower compares what both logs should have."""

from types import SimpleNamespace
from typing import Any

import pytest

from duemq_server.replication.protocol.follower import StreamBroken
from duemq_server.replication.protocol.messages import LogPart, Welcome
from duemq_server.replication.protocol.record import Refused, ReplicaId
from duemq_server.replication.running.following.stream import Following
from duemq_server.storage.errors import CorruptLog

LEADER = ReplicaId("a", "a" * 32)


async def compare(part: LogPart | None, own: int | Exception) -> None:
    def checksum(start: int, end: int) -> int:
        assert (start, end) == (40, 80)
        if isinstance(own, Exception):
            raise own
        return own

    held = SimpleNamespace(directory="/data/log", written_position=80, checksum=checksum)
    following: Any = SimpleNamespace(_log=held)
    await Following._compare(following, Welcome(1, LEADER, 96, part))


async def test_another_log_than_the_leaders_is_refused() -> None:
    await compare(LogPart(40, 80, 7), 7)
    with pytest.raises(Refused, match="/data/log is not a/"):
        await compare(LogPart(40, 80, 8), 7)


@pytest.mark.parametrize("part", [None, LogPart(40, 88, 8)])
async def test_what_nobody_tells_or_is_not_written_yet_is_not_compared(part: LogPart) -> None:
    await compare(part, 7)


@pytest.mark.parametrize(
    "error", [IndexError("gone"), OSError("I/O"), CorruptLog("/data/log/0", 4, "it ends", "none")]
)
async def test_what_cannot_be_read_here_ends_the_stream_and_is_said(error: Exception) -> None:
    """Not with a traceback each second."""
    with pytest.raises(StreamBroken, match="cannot be read here"):
        await compare(LogPart(40, 80, 7), error)
