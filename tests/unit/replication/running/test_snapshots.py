from __future__ import annotations

import asyncio
import io
import threading

import pytest

from duemq.errors import Unavailable
from duemq_server.replication.running import snapshots
from duemq_server.replication.running.threads import in_thread
from duemq_server.replication.running.v1 import replication_pb2 as pb


@pytest.mark.parametrize(("rate", "largest"), [(0, 1 << 20), (1 << 20, 512 << 10), (1, 64 << 10)])
async def test_parts_are_small_enough_for_the_rate(
    rate: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "wait_s", lambda *_: 0.0)
    data = bytes(range(256)) * 8 * 1024
    parts: list[bytes] = []

    async def write(part: pb.SnapshotPart) -> None:
        parts.append(part.data)

    await snapshots.send(io.BytesIO(data), rate, write, lambda: False)
    assert b"".join(parts) == data
    assert max(map(len, parts)) == largest


async def test_a_part_is_never_long_in_coming_however_low_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who gets it would give it up, and begin anew, for ever."""
    waits: list[float] = []

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)

    async def write(part: pb.SnapshotPart) -> None:
        pass

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await snapshots.send(io.BytesIO(bytes(1 << 18)), 1024, write, lambda: False)
    assert waits == [snapshots.PACE_MS / 1000] * 4


async def test_who_is_about_to_lead_no_more_sends_no_further() -> None:
    parts: list[bytes] = []

    async def write(part: pb.SnapshotPart) -> None:
        parts.append(part.data)

    data = io.BytesIO(bytes(5 << 20))
    with pytest.raises(Unavailable, match="about to lead"):
        await snapshots.send(data, 0, write, lambda: len(parts) == 2)
    assert len(parts) == 2


def test_who_has_sent_more_than_the_rate_allows_waits() -> None:
    assert snapshots.wait_s(3 << 20, 1 << 20, 1_000) == 2.0
    assert snapshots.wait_s(1 << 20, 1 << 20, 5_000) == 0.0
    assert snapshots.wait_s(1 << 30, 0, 0) == 0.0


async def test_what_a_thread_does_is_done_before_its_caller_ends() -> None:
    began, may_end, done = threading.Event(), threading.Event(), []

    def work() -> None:
        began.set()
        assert may_end.wait(60)
        done.append(True)

    caller = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(began.wait, 60)
    for _ in range(2):  # the second one, say, because whoever waits for the caller is cancelled
        caller.cancel()
        for _ in range(5):
            await asyncio.to_thread(lambda: None)
    waits = not caller.done()
    may_end.set()
    assert waits
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done
