"""Throughput: an iterable, single calls with receipts, and what happens to a message that fails."""

import sys

from duemq import Outgoing, Producer
from duemq.errors import DuemqError, NotAllSent

NAMESERVER = sys.argv[1] if len(sys.argv) > 1 else None  # None: as DUEMQ_NAMESERVER says

with Producer(NAMESERVER) as producer:
    receipts = producer.send_many("readings", (b"reading %d" % i for i in range(10_000)))
    print(len(receipts), "stored")

    pending = [producer.submit("readings", b"one by one %d" % i) for i in range(1_000)]
    print(len({each.result().message_id for each in pending}), "stored")

    # What differs from message to message goes into Outgoing; one ordering key, one queue.
    orders = [
        Outgoing(b"order", key=f"order-{i}", ordering_key=f"customer-{i % 3}") for i in range(9)
    ]
    print(
        len({(r.broker, r.queue) for r in producer.send_many("orders", orders)}), "queues at most 3"
    )

    try:
        producer.send_many("orders", [b"fits", bytes(5 * 1024 * 1024)])
    except NotAllSent as error:
        for position, cause in error.failures.items():
            print("number", position, type(cause).__name__, cause.field)
    except DuemqError as error:
        print(type(error).__name__, error)
