"""The load of `make kind-test`: sends for a while, then reads everything back and judges.

Each message carries its number, every tenth is delayed.  While it sends, brokers are killed.  Fails
if a message that was acknowledged does not arrive, if one lies in the log twice or came early.
Prints the longest pauses between two acknowledgements.
"""

import itertools
import os
import sys
import threading
import time
from collections import defaultdict

import duemq
from duemq import errors
from duemq.consumer.settings import ConsumerSettings

TOPIC = "kind-load"
SECONDS = float(os.environ.get("LOAD_SECONDS", "75"))
PER_SECOND = 400
DELAYED_EVERY = 10
DELAY_S = 3.0
RECEIPT_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 180.0
PAUSES = 5


def send(nameserver: str) -> tuple[set[int], int]:
    """Sends at a steady rate.  The numbers that were acknowledged, and how many failed."""
    pending = []
    answered = [time.monotonic()]
    with duemq.Producer(nameserver) as producer:
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < SECONDS:
            while len(pending) < elapsed * PER_SECOND:
                number = len(pending)
                delay = DELAY_S if number % DELAYED_EVERY == 0 else None
                pending.append(producer.submit(TOPIC, str(number).encode(), delay=delay))
                pending[-1].add_done_callback(lambda _: answered.append(time.monotonic()))
            time.sleep(0.02)
        print(f"submitted {len(pending)}", flush=True)
        acknowledged, failures = set(), 0
        for number, one in enumerate(pending):
            try:
                one.result(RECEIPT_TIMEOUT_S)
                acknowledged.add(number)
            except errors.DuemqError as error:
                failures += 1
                print(f"not acknowledged: {number}: {error}", flush=True)
    print(pauses(answered), flush=True)
    return acknowledged, failures


def pauses(answered: list[float]) -> str:
    """The longest ones, and when each began."""
    answered.sort()
    gaps = sorted((b - a, a - answered[0]) for a, b in itertools.pairwise(answered))
    longest = ", ".join(f"{gap:.2f} s at {at:.0f} s" for gap, at in reversed(gaps[-PAUSES:]))
    return f"longest pauses of sends: {longest}"


def receive(nameserver: str, wanted: set[int]) -> tuple[dict[int, set[tuple[str, int, int]]], int]:
    """Where each number lies in the log, and how many came before they were due."""
    places: dict[int, set[tuple[str, int, int]]] = defaultdict(set)
    early = 0
    guard = threading.Lock()  # callbacks run in several threads

    def keep(messages: list[duemq.Message]) -> None:
        nonlocal early
        now_ms = time.time_ns() // 1_000_000
        with guard:
            for message in messages:
                places[int(message.body)].add((message.broker, message.queue, message.offset))
                early += (message.due_ms or 0) > now_ms

    settings = ConsumerSettings(start_from="earliest")
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    with duemq.PushConsumer(
        "kind-load", TOPIC, keep, batch=True, nameserver=nameserver, settings=settings
    ):
        while not wanted <= places.keys() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(DELAY_S)  # for what came twice
    return places, early


def main() -> int:
    """Returns the exit status."""
    nameserver = os.environ["NAMESERVERS"]
    acknowledged, failures = send(nameserver)
    places, early = receive(nameserver, acknowledged)
    lost = sorted(acknowledged - places.keys())
    twice = {number: found for number, found in places.items() if len(found) > 1}
    print(
        f"acknowledged {len(acknowledged)}, failed {failures}, arrived {len(places)}, "
        f"lost {len(lost)} {lost[:10]}, twice {len(twice)} {dict(list(twice.items())[:3])}, "
        f"early {early}",
        flush=True,
    )
    return 1 if lost or twice or early or not acknowledged else 0


if __name__ == "__main__":
    sys.exit(main())
