"""`duemq bench restart`: a broker with a large log after kill -9, until it accepts again.

Needs a cluster of its own.  `restart_s` is from the start of the process to the first durable send.
The kill comes while messages are being sent; all that were acknowledged are counted afterwards.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from duemq import PendingReceipt, Producer
from duemq.errors import DuemqError
from duemq.settings import ProducerSettings
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.bench.harness.traffic import Receiver, bodies, fill

BROKER = "broker-0"
# Sent while the broker is killed: in flight, some acknowledged, some not.
LOAD_COUNT = 2_000_000
LOAD_S = 1.0
FIRST_SEND_TIMEOUT_S = 120.0


def run(target: Target, report: Report, *, log_bytes: int, size: int) -> None:
    """Fills the log, kills the broker under load, measures its first accepted send."""
    cluster = target.cluster
    assert cluster is not None
    topic = target.new_topic("restart")
    count = log_bytes // size
    report.figures["msgs_per_s"] = round(count / fill(target.nameserver, topic, count, size))
    load = _Load(target.nameserver, target.new_topic("load"), size)
    load.start()
    time.sleep(LOAD_S)
    cluster.kill(BROKER, restart=False)
    load.stop.set()
    began = time.perf_counter()
    cluster.start_member(BROKER)
    settings = ProducerSettings(send_timeout_s=FIRST_SEND_TIMEOUT_S)
    with Producer(target.nameserver, settings=settings) as producer:
        producer.send(load.topic, b"first")
    report.figures["restart_s"] = round(time.perf_counter() - began, 3)
    load.join()
    with Receiver(target.nameserver, topic, count) as receiver:
        receiver.wait()
    report.figures |= receiver.figures()
    stored = [message.body for message in read_topic(target.nameserver, load.topic)]
    report.figures["lost"] += len(load.acknowledged - set(stored))
    report.figures["twice"] += len(stored) - len(set(stored))


class _Load(threading.Thread):
    """Sends until told to stop, and remembers what was acknowledged."""

    def __init__(self, nameserver: str, topic: str, size: int) -> None:
        super().__init__(name="load")
        self.topic = topic
        self.stop = threading.Event()
        self.acknowledged: set[bytes] = set()
        self._nameserver = nameserver
        self._size = size

    def run(self) -> None:
        with Producer(self._nameserver) as producer:
            pending: list[tuple[bytes, PendingReceipt]] = []
            with suppress(DuemqError):  # the buffer stayed full while the broker was away
                for body in bodies(LOAD_COUNT, self._size):
                    if self.stop.is_set():
                        break
                    pending.append((body, producer.submit(self.topic, body)))
            for body, receipt in pending:
                with suppress(DuemqError):
                    receipt.result()
                    self.acknowledged.add(body)
