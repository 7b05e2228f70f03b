"""`duemq bench tracing`: what tracing costs, by the share of messages that get a trace."""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from duemq import PendingReceipt, Producer
from duemq.protocol.names import TRACE_TOPIC
from duemq.telemetry.exporter import DueMQSpanExporter
from duemq.telemetry.pipeline import EXPORT_TIMEOUT_S, Pipeline, Provider
from duemq.telemetry.queue import EXPORT_PERIOD_MS
from duemq.telemetry.sink import TraceSink
from duemq.tracing import spans
from duemq_server.bench.harness import target as targets
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import Receiver, bodies, fill

OFF = "off"
PERCENTS = {"sampled_0": 0, "sampled_10": 10, "sampled_100": 100}
# Until the services have sent their spans.
SETTLE_S = 1.5 * EXPORT_PERIOD_MS / 1000
RECEIPTS_BEHIND = 20_000
TRACED = {kind: ["--tracing", "duemq"] for kind in ("broker", "timer")}


@dataclass
class Runs:
    """Of one call at one level, an entry a round."""

    msgs_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """A message's, of all processes."""


class Level:
    """A share of messages that get a trace, or no tracing at all."""

    def __init__(self, name: str, target: Target) -> None:
        self.runs: dict[str, Runs] = defaultdict(Runs)
        """By call."""
        self._target = target
        self._pipeline: Pipeline | None = None
        if name != OFF:
            sampler = ParentBasedTraceIdRatio(PERCENTS[name] / 100)
            sink = TraceSink(target.nameserver, TRACE_TOPIC, EXPORT_TIMEOUT_S)
            self._pipeline = Pipeline(Provider(sampler), DueMQSpanExporter(lambda: sink))

    def measure(self, count: int, size: int) -> dict[str, int]:
        """Each call once; answers what was lost or came twice."""
        target = self._target
        if not self.runs:
            fill(target.nameserver, target.new_topic("warm"), count // 10, size)
        spans.use(self._pipeline.provider if self._pipeline is not None else None)
        try:
            topic = target.new_topic("submit")
            self._timed("submit", count, lambda: _submit(target.nameserver, topic, count, size))
            topic = target.new_topic("tracing")
            self._timed("send_many", count, lambda: fill(target.nameserver, topic, count, size))
            receiver = Receiver(target.nameserver, topic, count)
            self._timed("consume", count, lambda: _drain(receiver))
            return receiver.figures()
        finally:
            spans.use(None)

    def _timed(self, call: str, count: int, function: Callable[[], float]) -> None:
        gc.collect()  # what the run before left is not this one's
        cpu = CpuMeter(self._target.cluster)
        seconds = function()
        if self._pipeline is not None:
            self._pipeline.flush()
        time.sleep(SETTLE_S)
        self.runs[call].msgs_per_s.append(count / seconds)
        self.runs[call].cpu_us.append(sum(cpu.us_per(count).values()))

    def close(self) -> dict[str, int]:
        """Answers what was dropped, by reason."""
        if self._pipeline is None:
            return {}
        self._pipeline.shutdown(EXPORT_TIMEOUT_S)
        return dict(self._pipeline.dropped_by_reason)


def run(target: Target, report: Report, *, count: int, size: int, rounds: int) -> None:
    """`rounds` times each call at each level in turn.

    What is off runs on `target`, whose services do not trace; the rest on a cluster beside it whose
    services do.
    """
    faults: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    with ExitStack() as stack:
        traced = stack.enter_context(
            targets.target(None, directory=str(target.directory), flags=TRACED)
        )
        levels = {name: Level(name, target if name == OFF else traced) for name in (OFF, *PERCENTS)}
        for level in levels.values():
            stack.callback(partial(_close, level, dropped))
        for turn in range(rounds):
            names = list(levels)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                faults.update(levels[name].measure(count, size))
    report.figures |= _figures({name: level.runs for name, level in levels.items()})
    report.figures |= {"dropped": dict(dropped), "lost": faults["lost"], "twice": faults["twice"]}


def _close(level: Level, dropped: Counter[str]) -> None:
    dropped.update(level.close())


def _figures(runs: dict[str, dict[str, Runs]]) -> dict[str, Any]:
    """Rates and CPU time: those without tracing, and the ratios to them, round by round."""
    off = runs[OFF]
    figures: dict[str, Any] = {
        "off_msgs_per_s": {c: round(median(each.msgs_per_s)) for c, each in off.items()},
        "off_cpu_us_per_msg": {c: round(median(each.cpu_us), 2) for c, each in off.items()},
    }
    for name in PERCENTS:
        figures[name] = {
            call: _ratio(each.msgs_per_s, off[call].msgs_per_s) for call, each in runs[name].items()
        }
        figures[f"{name}_cpu"] = {
            call: _ratio(each.cpu_us, off[call].cpu_us) for call, each in runs[name].items()
        }
    return figures


def _ratio(with_it: list[float], without: list[float]) -> float:
    return round(median(a / b for a, b in zip(with_it, without, strict=True)), 3)


def _submit(nameserver: str, topic: str, count: int, size: int) -> float:
    pending: deque[PendingReceipt] = deque()
    with Producer(nameserver) as producer:
        submit = producer.submit
        began = time.perf_counter()
        for body in bodies(count, size):
            pending.append(submit(topic, body))
            if len(pending) > RECEIPTS_BEHIND:
                pending.popleft().result()
        while pending:
            pending.popleft().result()
        return time.perf_counter() - began


def _drain(receiver: Receiver) -> float:
    began = time.perf_counter()
    with receiver:
        receiver.wait()
    return receiver.last_arrival - began
