"""`duemq bench timers`: how fast delayed messages are accepted, fired, and how late they come.

Two phases of `count` messages each.  All due at one moment: accepted_per_s and fired_per_s.  Due
evenly within `spread` seconds: `p50_ms` … are their lateness at the consumer, `drained_s` goes from
the first due time to the last store time, and `disordered` counts what came behind a message of its
queue that was due later.

With `others`, so many messages a second of another topic fall due in the second phase as well:
`others_p50_ms` … are the lateness at the broker of those that were due from its first due time on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from duemq import Message, Outgoing, Producer
from duemq_server.bench.harness import floors
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import Receiver, bodies
from duemq_server.bench.matrix.trickle import Trickle

# The slowest acceptance still planned for: due times lie behind the end of the sending.
ACCEPTED_PER_S_LEAST = 20_000
LEAD_S = 3.0
LATENESS = ("p50_ms", "p99_ms", "max_ms")
FAULTS = ("lost", "twice", "early")


class TimedReceiver(Receiver):
    """Notes store time, receipt and due time of each message."""

    def __init__(self, nameserver: str, topic: str, count: int) -> None:
        super().__init__(nameserver, topic, count)
        self.early = 0
        self.disordered = 0
        self.store_ms: list[int] = []
        self.stored_late_ms: list[float] = []
        self.received_late_ms: list[float] = []
        self._latest_ms: dict[tuple[str, int], int] = {}  # due time, by queue

    def observe(self, messages: Sequence[Message]) -> None:
        """Compares the times."""
        now_ms = time.time_ns() / 1e6
        for message in messages:
            due_ms, store_ms = message.due_ms or 0, message.store_ms
            self.early += store_ms < due_ms or now_ms < due_ms
            self.store_ms.append(store_ms)
            self.stored_late_ms.append(store_ms - due_ms)
            self.received_late_ms.append(now_ms - due_ms)
            queue = message.broker, message.queue
            latest_ms = self._latest_ms.get(queue, 0)
            self.disordered += due_ms < latest_ms
            self._latest_ms[queue] = max(due_ms, latest_ms)


class Phase(NamedTuple):
    """What came of one."""

    accepted_s: float
    due_ms: int
    """When the first was due."""
    receiver: TimedReceiver
    late: dict[str, float]
    """Of the others."""
    faults: Counter[str]


def run(
    target: Target, report: Report, *, count: int, size: int, spread_s: float, others: int
) -> None:
    """Runs both phases."""
    cpu = CpuMeter(target.cluster)
    burst = phase(target, count, size, 0.0)
    report.figures["cpu_us_per_msg"] = cpu.us_per(count)
    stored_ms = burst.receiver.store_ms
    report.figures["accepted_per_s"] = round(count / burst.accepted_s)
    report.figures["fired_per_s"] = round(count * 1000 / (max(stored_ms) - min(stored_ms) + 1))
    report.figures["msgs_per_s"] = report.figures["accepted_per_s"]
    report.floor(
        floors.durable_writes(
            target.directory, size, floors.FRAME_BYTES // size or 1, count
        ).msgs_per_s
    )
    spread = phase(target, count, size, spread_s, others)
    report.figures |= summary(spread.receiver.received_late_ms)
    report.figures["drained_s"] = (max(spread.receiver.store_ms) - spread.due_ms) / 1000
    report.figures["disordered"] = spread.receiver.disordered
    report.figures |= {f"others_{name}": value for name, value in spread.late.items()}
    for name in FAULTS:
        report.figures[name] = burst.faults[name] + spread.faults[name]


def phase(target: Target, count: int, size: int, spread_s: float, others: int = 0) -> Phase:
    """Sends `count`, due within `spread_s`, and receives them; then `others` a second, too."""
    topic = target.new_topic("timers")
    lead_s = LEAD_S + count / ACCEPTED_PER_S_LEAST
    due_ms = int((time.time() + lead_s) * 1000)
    step_ms = spread_s * 1000 / count
    outgoing = (
        Outgoing(body, deliver_at=due_ms + int(number * step_ms))
        for number, body in enumerate(bodies(count, size))
    )
    with ExitStack() as around:
        receiver = around.enter_context(TimedReceiver(target.nameserver, topic, count))
        with Producer(target.nameserver) as producer:
            began = time.perf_counter()
            producer.send_many(topic, outgoing)
            accepted_s = time.perf_counter() - began
        receiver.last_arrival += lead_s + spread_s
        trickle: Trickle | None = None
        if others:
            other = target.new_topic("others")
            trickle = around.enter_context(Trickle(target.nameserver, other, others))
        receiver.wait()
    faults = Counter(receiver.figures() | {"early": receiver.early})
    late: dict[str, float] = {}
    if trickle is not None:
        figures = trickle.figures(since_ms=due_ms)
        late = {name: figures[name] for name in LATENESS}
        faults.update({name: figures[name] for name in FAULTS})
    return Phase(accepted_s, due_ms, receiver, late, faults)
