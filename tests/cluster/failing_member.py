"""A member that fails what is called bad and never commits, to be killed.

python -m tests.cluster.failing_member NAMESERVER GROUP TOPIC

Prints the body of each message that it is given as a JSON line.
"""

import json
import sys
import threading

from duemq import ConsumerSettings, Message, PushConsumer, RetryLater

_printing = threading.Lock()


def receive(message: Message) -> None:
    """The callback."""
    with _printing:
        print(json.dumps(message.body.decode()), flush=True)
    if message.body.startswith(b"bad"):
        raise RetryLater("3s", "bad indeed")


if __name__ == "__main__":
    nameserver, group, topic = sys.argv[1:]
    # When it is killed the next one waits for the end of its session.  A shorter one may end while
    # a busy machine does not let it run.
    settings = ConsumerSettings(start_from="earliest", session_timeout_s=6, commit_interval_s=3_600)
    PushConsumer(group, topic, receive, nameserver=nameserver, settings=settings).run()
