"""The same with asyncio: many senders, one connection."""

import asyncio
import sys

from duemq import aio

NAMESERVER = sys.argv[1] if len(sys.argv) > 1 else None  # None: as DUEMQ_NAMESERVER says


async def main():
    received = asyncio.Queue()
    consumer = aio.PushConsumer(
        "workers", "jobs", received.put, start_from="earliest", nameserver=NAMESERVER
    )
    async with aio.Producer(NAMESERVER) as producer, consumer:
        sends = [producer.send("jobs", b"job %d" % i, tag="urgent") for i in range(100)]
        receipts = await asyncio.gather(*sends)
        messages = [await received.get() for _ in receipts]
        print({m.message_id for m in messages} == {r.message_id for r in receipts})


asyncio.run(main())
