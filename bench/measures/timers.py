"""`duemq bench timers`: how fast delayed messages are accepted, fired, and how late they come.

Two phases of `count` messages each: all due at one moment (accepted_per_s and fired_per_s), then
due evenly within `spread` seconds (max_ms: lateness at the consumer).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from duemq import Message, Outgoing, Producer
from duemq_server.bench.harness import floors
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import Receiver, bodies

# The slowest acceptance still planned for: due times lie behind the end of the sending.
ACCEPTED_PER_S_LEAST = 20_000
LEAD_S = 3.0


class TimedReceiver(Receiver):
    """Notes store time, receipt and due time of each message."""

    def __init__(self, nameserver: str, topic: str, count: int) -> None:
        super().__init__(nameserver, topic, count)
        self.early = 0
        self.store_ms: list[int] = []
        self.stored_late_ms: list[float] = []
        self.received_late_ms: list[float] = []

    def observe(self, messages: Sequence[Message]) -> None:
        """Compares the times."""
        now_ms = time.time_ns() / 1e6
        for message in messages:
            due_ms, store_ms = message.due_ms or 0, message.store_ms
            self.early += store_ms < due_ms or now_ms < due_ms
            self.store_ms.append(store_ms)
            self.stored_late_ms.append(store_ms - due_ms)
            self.received_late_ms.append(now_ms - due_ms)


def run(target: Target, report: Report, *, count: int, size: int, spread_s: float) -> None:
    """Runs both phases."""
    cpu = CpuMeter(target.cluster)
    accepted_s, burst = phase(target, count, size, 0.0)
    report.figures["cpu_us_per_msg"] = cpu.us_per(count)
    fired_s = (max(burst.store_ms) - min(burst.store_ms) + 1) / 1000
    report.figures["accepted_per_s"] = round(count / accepted_s)
    report.figures["fired_per_s"] = round(count / fired_s)
    report.figures["msgs_per_s"] = report.figures["accepted_per_s"]
    report.floor(
        floors.durable_writes(
            target.directory, size, floors.FRAME_BYTES // size or 1, count
        ).msgs_per_s
    )
    _, spread = phase(target, count, size, spread_s)
    report.figures |= summary(spread.received_late_ms)
    report.figures["early"] = burst.early + spread.early
    for name in ("lost", "twice"):
        report.figures[name] = burst.figures()[name] + spread.figures()[name]


def phase(target: Target, count: int, size: int, spread_s: float) -> tuple[float, TimedReceiver]:
    """Sends `count`, due within `spread_s`; seconds until accepted, and who received them."""
    topic = target.new_topic("timers")
    lead_s = LEAD_S + count / ACCEPTED_PER_S_LEAST
    due_ms = int((time.time() + lead_s) * 1000)
    step_ms = spread_s * 1000 / count
    outgoing = (
        Outgoing(body, deliver_at=due_ms + int(number * step_ms))
        for number, body in enumerate(bodies(count, size))
    )
    with TimedReceiver(target.nameserver, topic, count) as receiver:
        with Producer(target.nameserver) as producer:
            began = time.perf_counter()
            producer.send_many(topic, outgoing)
            accepted_s = time.perf_counter() - began
        receiver.last_arrival += lead_s + spread_s
        receiver.wait()
    return accepted_s, receiver
