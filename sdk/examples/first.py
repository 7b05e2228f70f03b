"""The first program: a message now, one in a second, one never."""

import sys
import time

from duemq import Producer, PushConsumer

NAMESERVER = sys.argv[1] if len(sys.argv) > 1 else None  # None: as DUEMQ_NAMESERVER says


def show(message):
    print(message.body.decode(), flush=True)


with (
    PushConsumer("readers", "greetings", show, start_from="earliest", nameserver=NAMESERVER),
    Producer(NAMESERVER) as producer,
):
    producer.send("greetings", b"hello")
    producer.send("greetings", b"hello in a second", delay="1s")
    receipt = producer.send("greetings", b"never seen", delay="1h")
    print("the third is", producer.cancel(receipt.handle))
    time.sleep(3)
