"""`helm test`: sends a message and a delayed one, and receives both, through the release.

It is all retried until the deadline: a Service that was just made takes a moment to work.  Brokers
need not make topics and groups by themselves: the topic stays, the group of each run goes.
"""

import os
import sys
import time
import uuid
from contextlib import suppress

import duemq
from duemq import errors
from duemq.consumer.settings import ConsumerSettings

DEADLINE_S = 120.0
DELAY_S = 2.0
TOPIC = "helm-test"


def main() -> None:
    """Raises if the messages do not come through in time."""
    began = time.monotonic()
    run = uuid.uuid4().hex
    bodies = {f"{run} now".encode(), f"{run} later".encode()}
    while True:
        try:
            received = round_trip(run, began + DEADLINE_S)
            break
        except errors.DuemqError as error:
            if time.monotonic() - began > DEADLINE_S or not error.retryable:
                raise
            print(f"trying on: {error}", flush=True)
            time.sleep(1.0)
    if not bodies <= {message.body for message in received}:
        sys.exit(f"received something else: {received}")
    late = next(message for message in received if message.body.endswith(b"later"))
    if not late.due_ms or late.store_ms < late.due_ms:
        sys.exit(f"early: stored at {late.store_ms}, due at {late.due_ms}")
    print(f"sent, delayed and received in {time.monotonic() - began:.1f} s", flush=True)


def round_trip(run: str, deadline: float) -> list[duemq.Message]:
    """Sends both messages and returns what arrived of this run."""
    nameserver = os.environ["NAMESERVERS"]
    group = f"helm-test-{run}"
    received: list[duemq.Message] = []
    with duemq.Admin(nameserver) as admin:
        with suppress(errors.TopicExists):
            admin.create_topic(TOPIC)
        admin.put_group(group)
        try:
            exchange(nameserver, run, group, received, deadline)
        finally:
            with suppress(errors.DuemqError):  # what is left is empty, and of no harm
                admin.delete_group(group)
    return received


def exchange(
    nameserver: str, run: str, group: str, received: list[duemq.Message], deadline: float
) -> None:
    """Sends, and returns when both are received."""
    with duemq.Producer(nameserver) as producer:
        print(producer.send(TOPIC, f"{run} now".encode(), key=run), flush=True)
        print(producer.send(TOPIC, f"{run} later".encode(), key=run, delay=DELAY_S), flush=True)

    def keep(message: duemq.Message) -> None:
        if message.key == run:
            received.append(message)

    settings = ConsumerSettings(start_from="earliest")
    with duemq.PushConsumer(group, TOPIC, keep, nameserver=nameserver, settings=settings):
        while len(received) < 2:
            if time.monotonic() > deadline:
                raise errors.Timeout(f"{len(received)} of 2 messages arrived")
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
