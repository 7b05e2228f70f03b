"""A client process of one release, at work while the cluster is upgraded.

    python -m tests.skew.client send NAMESERVERS TOPIC FILE NAME
    python -m tests.skew.client consume NAMESERVERS TOPIC FILE NAME
    python -m tests.skew.client tend NAMESERVERS TOPIC FILE NAME

It appends to FILE what it does and sees, for `tests.cluster.checker`, and ends when its standard
input does.  `sent`, `acked` and so on are as there; "in doubt" is a message of which it was not
told what its cancel, or its replacement, came to.  What `tend` does: tending.py.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import tenacity

from duemq import Message, Producer, PushConsumer, Receipt
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import DuemqError
from duemq.settings import ProducerSettings
from tests.cluster.history import History, now_ms
from tests.skew.tending import tend

SEND_S = 60.0
DELAY_S_MAX = 3.0
BURST = 20
PAUSE_S = 0.05
ASKED_MAX = 30
ASKED_WAIT_S = 1.0


class Recorded(History):
    """A history that others can read while it grows."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file.open("a", encoding="utf-8", buffering=1)
        self._writing = threading.Lock()  # guards _file

    def add(self, event: str, id: str, **fields: object) -> None:
        super().add(event, id, **fields)
        with self._writing:
            self._file.write(json.dumps({"event": event, "id": id, **fields}) + "\n")


class Sender:
    """Sends to a topic: alone and in bursts, delayed, under timer keys; cancels some of it."""

    def __init__(self, producer: Producer, topic: str, history: History, name: str) -> None:
        self._producer = producer
        self._topic = topic
        self._history = history
        self._name = name
        self._random = random.Random(name)
        self._number = 0

    def step(self) -> None:
        """One thing."""
        doings = (self._burst, self._burst, self._burst, self._timers, self._replace)
        self._random.choice(doings)()

    def _ids(self, count: int) -> list[str]:
        self._number += count
        return [f"{self._name}-{number}" for number in range(self._number - count, self._number)]

    def _delay(self) -> float:
        return self._random.uniform(0, DELAY_S_MAX)

    def _burst(self) -> None:
        delay = self._random.choice([None, self._delay()])
        key = self._name if delay is None else None
        ids = self._ids(self._random.choice([1, BURST]))
        send = self._history.send_burst
        receipts = send(self._producer, self._topic, ids, delay=delay, ordering_key=key)
        if delay is not None and receipts[0] is not None:
            handle = receipts[0].handle
            self._cancel(ids[0], lambda: str(self._producer.cancel(handle).value))

    def _timers(self) -> None:
        (id,) = self._ids(1)
        if self._keyed(id, id, self._delay()) is None:
            return
        way = self._random.choice(["leave", "cancel", "reschedule"])
        if way == "cancel":
            key = self._topic, id
            self._cancel(id, lambda: str(self._producer.cancel(key=key).value))
        elif way == "reschedule":
            self._reschedule(id)

    def _replace(self) -> None:
        """What is replaced counts as cancelled."""
        before, after = self._ids(2)
        if self._keyed(before, before, self._delay()) is None:
            return
        receipt = self._keyed(after, before, self._delay())
        if receipt is None:
            self._history.add("in doubt", before)
        elif receipt.replaced:
            self._history.add("cancelled", before, outcome="cancelled")

    def _keyed(self, id: str, timer_key: str, delay: float) -> Receipt | None:
        return self._history.send(self._producer, self._topic, id, delay=delay, timer_key=timer_key)

    def _reschedule(self, id: str) -> None:
        """Not earlier than its receipt says."""
        key = self._topic, id
        asked = self._asked(lambda: self._producer.reschedule(key=key, delay=DELAY_S_MAX))
        if asked is None:
            self._history.add("in doubt", id)

    def _cancel(self, id: str, cancel: Callable[[], str]) -> None:
        if self._random.random() < 0.5:
            return
        outcome = self._asked(cancel)
        if outcome is None:
            self._history.add("in doubt", id)
        else:
            self._history.add("cancelled", id, outcome=outcome)

    @staticmethod
    def _asked(ask: Callable[[], object]) -> object:
        """Asked until it is answered; None: it was not."""
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(ASKED_MAX),
            wait=tenacity.wait_fixed(ASKED_WAIT_S),
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, DuemqError) and error.retryable
            ),
            retry_error_callback=lambda state: None,
        )
        try:
            return retrying(ask)
        except DuemqError:
            return None


def send(nameserver: str, topic: str, history: History, name: str, stop: threading.Event) -> None:
    """Until `stop`."""
    settings = ProducerSettings(send_timeout_s=SEND_S)
    with Producer(nameserver, settings=settings) as producer:
        sender = Sender(producer, topic, history, name)
        while not stop.wait(PAUSE_S):
            sender.step()


def consume(
    nameserver: str, topic: str, history: History, name: str, stop: threading.Event
) -> None:
    """A member of the group that is called as the topic."""

    def receive(message: Message) -> None:
        place = {"broker": message.broker, "queue": message.queue, "offset": message.offset}
        history.add("received", message.key or "", group=topic, at_ms=now_ms(), **place, by=name)

    settings = ConsumerSettings(start_from="earliest")
    with PushConsumer(topic, topic, receive, nameserver=nameserver, settings=settings):
        stop.wait()


def main() -> None:
    """See the module."""
    what, nameserver, topic, file, name = sys.argv[1:]
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    history = Recorded(Path(file))
    work = {"send": send, "consume": consume, "tend": tend}[what]
    work(nameserver, topic, history, name, stop)


if __name__ == "__main__":
    main()
