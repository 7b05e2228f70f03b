"""A member of a benchmark's group, in a process of its own.

    … duemq_server.bench.harness.member NAMESERVER TOPIC FILE COUNT SESSION_TIMEOUT_S count|note

It says "ready" when it is up, joins at a line on its standard input and says "joined", and leaves
when that ends, as it does when the benchmark dies.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from duemq import ConsumerSettings, Message, PushConsumer, tune_process
from duemq_server.bench.harness.counts import Tally
from duemq_server.bench.harness.target import group_of


def main() -> None:
    """Consumes until standard input ends."""
    nameserver, topic, file, count, session_timeout_s, mode = sys.argv[1:]
    tune_process()  # as the benchmark's own process
    with Tally(Path(file), int(count)) as tally:

        def note(message: Message) -> None:
            tally.note(message, time.perf_counter_ns())

        settings = ConsumerSettings(
            start_from="earliest",
            # The tally is one thread's; with more the interpreter would only switch among them.
            threads=1,
            session_timeout_s=float(session_timeout_s),
        )
        consumer = PushConsumer(
            group_of(topic),
            [topic],
            tally.count if mode == "count" else note,
            nameserver=nameserver,
            settings=settings,
        )
        print("ready", flush=True)
        if sys.stdin.readline():
            with consumer:
                print("joined", flush=True)
                sys.stdin.read()


if __name__ == "__main__":
    main()
