"""Clients that connect by the hundred may take the last file that a process may open."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from duemq.errors import Unavailable
from tests.service.running_broker import batch, running_broker, topic_name
from tests.service.running_cluster import until

SEGMENT_BYTES = 1 << 16


async def test_a_broker_waits_until_it_may_open_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0
    allowed = os.open

    def none_left(path: str, *how: Any, **more: Any) -> int:
        nonlocal refused
        if str(path).startswith(str(tmp_path)):
            refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return allowed(path, *how, **more)

    topic = topic_name()
    async with running_broker(tmp_path, segment_bytes=SEGMENT_BYTES, checkpoint_interval=0.1) as (
        broker,
        client,
    ):
        await client.send(batch(topic, [b"a"]))
        stop = asyncio.Event()
        running = asyncio.create_task(broker.run(stop))
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", none_left)
            sending = asyncio.create_task(client.send(batch(topic, [bytes(SEGMENT_BYTES)])))
            await until(lambda: refused > 5)
            assert not running.done()
            assert not sending.done()
            with pytest.raises(Unavailable, match="Too many open files"):
                await client.bodies(topic)
        [stored] = await sending
        assert stored.base_offset == 1
        checkpoint = broker.store.checkpoint_position
        await until(lambda: broker.store.checkpoint_position > checkpoint)
        stop.set()
        await running
    async with running_broker(tmp_path) as (_, again):
        assert await again.bodies(topic) == [b"a", bytes(SEGMENT_BYTES)]
