"""In order by key: a failure holds up its own key only.  And broadcast: everything for everyone."""

import sys
import tempfile
import threading
from collections import defaultdict

from duemq import ConsumerSettings, Message, Outgoing, Producer, PushConsumer

NAMESERVER = sys.argv[1] if len(sys.argv) > 1 else None  # None: as DUEMQ_NAMESERVER says
STEPS = ("ordered", "paid", "sent")
CUSTOMERS = ("ada", "bob", "eve")

steps: defaultdict[str, list[str]] = defaultdict(list)
all_done = threading.Event()


def process(message: Message) -> None:
    """One message of a customer at a time; another customer's may run beside it."""
    customer, step = message.ordering_key or "", message.body.decode()
    if (customer, step) == ("bob", "paid") and message.attempt == 1:
        raise RuntimeError("the bank does not answer")  # tried again, before bob's "sent"
    steps[customer].append(step)
    if sum(map(len, steps.values())) == len(STEPS) * len(CUSTOMERS):
        all_done.set()


with Producer(NAMESERVER) as producer:
    producer.send_many(
        "purchases",
        [Outgoing(step.encode(), ordering_key=who) for step in STEPS for who in CUSTOMERS],
    )
settings = ConsumerSettings(start_from="earliest", suspend_s=0.1)
with PushConsumer(
    "shipping", "purchases", process, order="key", nameserver=NAMESERVER, settings=settings
):
    all_done.wait(30)
for customer in CUSTOMERS:
    print(customer, *steps[customer])

with tempfile.TemporaryDirectory() as directory:  # leave it out: ~/.duemq/offsets
    settings = ConsumerSettings(start_from="earliest", offsets_dir=directory)
    counted = threading.Semaphore(0)
    for screen in ("screen-1", "screen-2"):
        with PushConsumer(
            "screens",
            "purchases",
            lambda message: counted.release(),
            broadcast=True,
            member_name=screen,
            nameserver=NAMESERVER,
            settings=settings,
        ):
            print(screen, sum(counted.acquire(timeout=30) for _ in range(9)), "messages")
