"""`helm test`: sends a message and a delayed one, and receives both, through the release.

Everything is retried until the deadline: a Service that was just made takes a moment to be programmed.
"""

import os
import sys
import time
import uuid

import duemq
from duemq import errors

DEADLINE_S = 120.0
DELAY_S = 2.0
TOPIC = "helm-test"


def main() -> None:
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
    assert {message.body for message in received} >= bodies, received
    late = next(message for message in received if message.body.endswith(b"later"))
    assert late.store_ms >= late.due_ms > 0, (late.store_ms, late.due_ms)
    print(f"sent, delayed and received in {time.monotonic() - began:.1f} s", flush=True)


def round_trip(run: str, deadline: float) -> list[duemq.Message]:
    nameserver = os.environ["NAMESERVERS"]
    received: list[duemq.Message] = []
    with duemq.Producer(nameserver) as producer:
        print(producer.send(TOPIC, f"{run} now".encode(), key=run), flush=True)
        print(producer.send(TOPIC, f"{run} later".encode(), key=run, delay=DELAY_S), flush=True)

    def keep(message: duemq.Message) -> None:
        if message.key == run:
            received.append(message)

    consumer = duemq.PushConsumer(
        f"helm-test-{run}", [TOPIC], keep, nameserver=nameserver, start_from="earliest"
    )
    with consumer:
        while len(received) < 2:
            if time.monotonic() > deadline:
                raise errors.Timeout(f"{len(received)} of 2 messages arrived")
            time.sleep(0.1)
    return received


if __name__ == "__main__":
    sys.exit(main())
