"""A push consumer in a process of its own, to be stopped and killed: prints when callbacks begin
and end, as JSON lines [what, key, broker, queue, offset].

    python -m tests.cluster.noting_member '{"group": …, "topics": …, "settings": {…}, …}'

with PushConsumer's arguments.  A message with the body "slow" takes SLOW_S.
"""

import json
import sys
import threading
import time
from typing import Any

from duemq import ConsumerSettings, Message, PushConsumer

SLOW_S = 0.3
_printing = threading.Lock()


def receive(message: Message) -> None:
    """The callback."""
    note("begin", message)
    if message.body == b"slow":
        time.sleep(SLOW_S)
    note("end", message)


def note(what: str, message: Message) -> None:
    """Prints a line."""
    place = [message.broker, message.queue, message.offset]
    with _printing:
        print(json.dumps([what, message.ordering_key, *place]), flush=True)


if __name__ == "__main__":
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    settings = ConsumerSettings(**arguments.pop("settings"))
    PushConsumer(callback=receive, settings=settings, **arguments).run()
