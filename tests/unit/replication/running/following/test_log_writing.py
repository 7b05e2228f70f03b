"""What writes a replica's log, tied to the event loop."""

from __future__ import annotations

import asyncio
import threading

from duemq_server.replication.running.following.log_writing import LogWriting
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.crash.faulty_disk import FaultyDisk


def opened() -> ReplicaLog:
    log = ReplicaLog.open("/data/log", FaultyDisk())
    list(log.recover())
    return log


async def test_who_leaves_in_the_middle_of_a_truncation_finds_it_done() -> None:
    log, begun, may_end = opened(), threading.Event(), threading.Event()
    first = log.append(1, [b"first"])[1]
    log.append(1, [b"second"])
    log.write_pending()
    cut = log._cut_at

    def slowly(position: int) -> None:
        begun.set()
        assert may_end.wait(30)
        cut(position)

    log._cut_at = slowly  # type: ignore[method-assign]
    leaving = asyncio.create_task(LogWriting(log).truncate(first))
    assert await asyncio.to_thread(begun.wait, 30)
    leaving.cancel()
    for _ in range(20):  # who does not wait for the thread would be through by now
        await asyncio.to_thread(lambda: None)
    assert not leaving.done()
    may_end.set()
    await asyncio.gather(leaving, return_exceptions=True)
    assert log.end_position == first
    assert leaving.cancelled()
