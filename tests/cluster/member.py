"""A member of a group in a process of its own, to be killed: prints what it receives as JSON lines.

python -m tests.cluster.member NAMESERVER GROUP TOPIC COMMIT_INTERVAL_S
"""

import json
import sys
import threading

from duemq import ConsumerSettings, Message, PushConsumer

_printing = threading.Lock()


def receive(message: Message) -> None:
    """The callback."""
    place = [message.broker, message.queue, message.offset]
    with _printing:
        print(json.dumps(place), flush=True)


if __name__ == "__main__":
    nameserver, group, topic, commit_interval_s = sys.argv[1:]
    # When it is killed the next one waits for the end of its session.  A shorter one may end while
    # a busy machine does not let it run.
    settings = ConsumerSettings(
        start_from="earliest", session_timeout_s=6, commit_interval_s=float(commit_interval_s)
    )
    PushConsumer(group, topic, receive, nameserver=nameserver, settings=settings).run()
