"""Who closes a producer that another is just closing waits until what it took is dealt with."""

import asyncio
import threading

from duemq import aio
from duemq.transport.closing import AsyncClient
from duemq.transport.loop_thread import Hosted


async def test_who_closes_second_waits_for_the_first(monkeypatch):
    producer, began, sent = aio.Producer("127.0.0.1:1"), asyncio.Event(), asyncio.Event()

    async def close():
        began.set()
        await sent.wait()

    monkeypatch.setattr(producer._client, "close", close)
    first, second = (asyncio.create_task(producer.close()) for _ in range(2))
    await began.wait()  # both have begun
    assert (first.done(), second.done()) == (False, False)
    sent.set()
    await asyncio.gather(first, second)
    await producer.close()


class Client(AsyncClient):
    def __init__(self):
        self.closing = threading.Semaphore(0)
        self.sent = asyncio.Event()

    async def start(self):
        pass

    async def close(self):
        self.closing.release()
        await self.sent.wait()


def test_a_thread_that_closes_second_does_too():
    client = Client()
    hosted = Hosted(client, "it")
    hosted.start()
    loop = hosted._thread.loop
    threads = [threading.Thread(target=hosted.close) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
            assert client.closing.acquire(timeout=30)
            assert thread.is_alive()
    finally:
        loop.call_soon_threadsafe(client.sent.set)
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    hosted.close()  # there is no thread any more
