"""A reminder that moves whenever its customer does something: debounce by timer key."""

import sys

from duemq import Outgoing, Producer, PullConsumer
from duemq.errors import TimerExists

NAMESERVER = sys.argv[1] if len(sys.argv) > 1 else None  # None: as DUEMQ_NAMESERVER says
CART = ("carts", "customer-7")

with Producer(NAMESERVER) as producer:
    # Each send replaces what waits under the key: of all these one message is delivered.
    for action in (b"apple", b"pear", b"plum"):
        receipt = producer.send("carts", action, delay="1h", timer_key="customer-7")
    print("replaced", receipt.replaced is not None)

    # Or the first one stays, and the error says what is there.
    try:
        producer.send("carts", b"never seen", delay="1s", timer_key="customer-7", if_absent=True)
    except TimerExists as error:
        print("exists", error.handle == receipt.handle, error.due_ms == receipt.due_ms)

    # Another due time, without sending it again; by key, or by handle.
    print(producer.reschedule(key=CART, delay="200ms").outcome)

    # Many at once, each under its key; some are cancelled.
    reminders = [
        Outgoing(b"never seen", delay="1h", timer_key=f"customer-{n}") for n in range(50, 100)
    ]
    producer.send_many("carts", reminders)
    outcomes = producer.cancel(key=[("carts", f"customer-{n}") for n in range(50, 100)])
    print(len(outcomes), *set(outcomes))

with PullConsumer(nameserver=NAMESERVER) as consumer:
    consumer.assign("carts", start_from="earliest")
    for message in consumer.poll(30.0):
        print(message.timer_key, message.body.decode())
