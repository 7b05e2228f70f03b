"""A process with a producer, a member of a group and an admin client, told what to do line by line.

Prints what it received, and the answer to each line.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from duemq import Admin, Message, Producer, PushConsumer
from duemq.consumer.settings import ConsumerSettings

_printing = threading.Lock()


def tell(**said: Any) -> None:
    with _printing:
        print(json.dumps(said), flush=True)


def main(nameserver: str, topic: str, group: str) -> None:
    settings = ConsumerSettings(start_from="earliest")

    def receive(message: Message) -> None:
        tell(received=message.body.decode())

    with (
        Producer(nameserver) as producer,
        Admin(nameserver) as admin,
        PushConsumer(group, topic, receive, nameserver=nameserver, settings=settings),
    ):
        tell(answer="ready")
        for line in sys.stdin:
            asked = json.loads(line)
            if (of := asked.get("change")) is not None:
                key = (topic, of)
                if asked.get("cancel"):
                    tell(answer=producer.cancel(key=key))
                else:
                    tell(answer=producer.reschedule(key=key, delay=asked["delay"]).outcome)
            elif asked.get("topic"):
                admin.create_topic(topic)
                tell(answer="made")
            elif asked.get("brokers"):
                tell(answer=sorted(each.name for each in admin.cluster().brokers))
            else:
                producer.send(topic, asked.pop("body").encode(), **asked)
                tell(answer="sent")


if __name__ == "__main__":
    main(*sys.argv[1:])
