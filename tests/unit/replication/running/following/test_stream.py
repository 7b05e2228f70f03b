"""A follower compares what both logs should have."""

from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.follower import Follower, StreamBroken
from duemq_server.replication.protocol.messages import Chunk, LogPart, Welcome
from duemq_server.replication.protocol.record import Record, Refused, ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running import wire
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


@pytest.mark.parametrize(("data", "of_use"), [(b"", True), (bytes(64), False)])
async def test_a_stream_is_of_use_once_something_of_it_was_taken(data: bytes, of_use: bool) -> None:
    """Else the next one is tried no sooner than after one that was refused."""
    record = Record("g", 7, frozenset("ab"), frozenset({LEADER}), 1, LEADER)
    known = {"start": 0, "end": 0, "durable": 0, "committed": 0}
    follower = Follower(ReplicaId("b", "b" * 32), record, Epochs(), **known)
    assert follower.welcome(Welcome(1, LEADER, 0)) is None
    messages = [wire.to_chunk(Chunk(1, LEADER, 0, data, 0, 0, 9)), grpc.aio.EOF]

    class Call:
        async def read(self) -> Any:
            return messages.pop(0)

    applying: Any = SimpleNamespace(advance=lambda *_: None)
    parts: tuple[Any, ...] = (None, None, applying, Times(), "h:1", *[lambda: None] * 3)
    following = Following(follower, *parts)
    with pytest.raises(StreamBroken):
        await following._take(Call())
    assert following.followed is of_use
