"""Drives the demo: starts the cluster, sends the day, cancels, kills, receives, reports, audits.

What else changes during the day is the tower's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from duemq import Admin, Message, Producer, PushConsumer, telemetry
from duemq.descriptions import TimerCount
from duemq_cli.histogram import COLUMNS, histogram_rows
from duemq_cli.text import table
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.demo.changes import by_hours
from duemq_server.demo.day import Departure, clock, load_day, schedule
from duemq_server.demo.ledger import Audit, Delivery, Ledger, LoggedMessage
from duemq_server.demo.live import Screen, Status
from duemq_server.demo.outage import Killing
from duemq_server.demo.tower import REMINDER_EVERY_MS, TOPIC, Tower, now_ms, outgoing
from duemq_server.local_cluster import EmbeddedCluster, safe_path

# Group → members.
GROUPS = {"gates": 3, "board": 1}
VICTIMS = ("broker-1", "timer-0")
# From the first send to the first departure: all messages are accepted well within it.
LEAD_S = 5.0
# A cancelled flight is cancelled this long before its due time: more than an outage takes.
CANCEL_LEAD_S = 8.0
# After the last departure, for what the outage or a slow machine has held up.
GRACE_S = 60.0
TICK_S = 0.1
REPORT_TIMEOUT_S = 300.0
REPORT_ERROR_CHARS_MAX = 2_000
# For the last spans to be stored.
TELEMETRY_TIMEOUT_S = 10.0


class ReportFailed(Exception):
    """The Spark report was not written; the text says why."""


@dataclass(frozen=True)
class Options:
    """What the flags say."""

    speed: float
    directory: Path
    inject_loss: bool
    report: bool
    replicas: int = 1


class Day:
    """One run.  Owned by the main thread; consumers only append to the ledger's deliveries."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._departures = load_day()
        self._ledger = Ledger(
            deliveries={group: [] for group in GROUPS}, reminder_every_ms=REMINDER_EVERY_MS
        )
        self._airports = {each.flight: each.origin for each in self._departures}
        self._handles: dict[str, str] = {}
        self._due: dict[str, int] = {}
        self._to_cancel: list[Departure] = []

    def run(self) -> Audit:
        """The whole demo; returns the ledger's verdict."""
        options = self._options
        replicas = f", {options.replicas} replicas each" if options.replicas > 1 else ""
        self._console.print(f"Starting a nameserver, two brokers and a timer service{replicas} …")
        flags = {kind: ["--tracing", "duemq"] for kind in ("broker", "timer")}
        directory = options.directory / "cluster"
        with EmbeddedCluster(directory, flags=flags, replicas=options.replicas) as cluster:
            self._fly(cluster)
            if options.report:
                self._report(cluster.nameserver)
            self._read_log(cluster.nameserver)
        if options.inject_loss:
            lost = self._ledger.deliveries["board"].pop()
            self._console.print(f"[bold]Injected: the delivery of {lost.flight} is dropped.[/]")
        return self._ledger.audit(len(self._departures), list(GROUPS))

    # -- the day ------------------------------------------------------------------------------

    def _fly(self, cluster: EmbeddedCluster) -> None:
        telemetry.configure("demo", exporter="duemq", nameserver=cluster.nameserver)
        consumers: list[PushConsumer] = []
        try:
            with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:
                admin.create_topic(TOPIC)
                tower = Tower(admin, producer, self._ledger, self._say)
                tower.remind()
                consumers = self._consumers(cluster.nameserver)
                self._send(producer)
                self._draw(admin)
                tower.open(self._departures, self._due, self._options.speed)
                self._follow(cluster, admin, tower)
                tower.close(cluster.nameserver)
        finally:
            for consumer in consumers:
                consumer.close()
            telemetry.shutdown(TELEMETRY_TIMEOUT_S)

    def _consumers(self, nameserver: str) -> list[PushConsumer]:
        consumers = []
        for group, members in GROUPS.items():
            for _ in range(members):
                consumer = PushConsumer(
                    group,
                    [TOPIC],
                    self._receiver(group),
                    nameserver=nameserver,
                    start_from="earliest",
                )
                consumer.start()
                consumers.append(consumer)
        return consumers

    def _receiver(self, group: str) -> Callable[[Message], None]:
        deliveries = self._ledger.deliveries[group]

        def receive(message: Message) -> None:
            deliveries.append(Delivery(message.key or "", now_ms()))

        return receive

    def _send(self, producer: Producer) -> None:
        begin_ms = now_ms() + int(LEAD_S * 1000)
        self._due = schedule(self._departures, begin_ms, self._options.speed)
        messages = [outgoing(each, self._due[each.flight]) for each in self._departures]
        receipts = producer.send_many(TOPIC, messages)
        for departure, receipt in zip(self._departures, receipts, strict=True):
            self._ledger.accept(departure.flight, receipt.due_ms or 0)
            self._handles[departure.flight] = receipt.handle or ""
        self._to_cancel = [departure for departure in self._departures if departure.cancelled]
        self._console.print(
            f"{len(messages):,} departures accepted, {len(self._to_cancel)} of them to be "
            f"cancelled; the day takes {self._length_s():.0f} s."
        )

    def _draw(self, admin: Admin) -> None:
        """What falls due in which hour of the day, as the timer service lists it."""
        due = [each.due_ms for each in admin.list_timers(TOPIC, limit=len(self._due))]
        buckets = by_hours(due, min(self._due.values()), self._options.speed)
        rows = histogram_rows(buckets, self._clock)
        columns = [column for column in COLUMNS if column != "within"]
        for line in table(columns, ([row[column] for column in columns] for row in rows)):
            self._say(line)

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)

    def _follow(self, cluster: EmbeddedCluster, admin: Admin, tower: Tower) -> None:
        """From the first departure to the last delivery."""
        begin_ms, end_ms = min(self._due.values()), max(self._due.values())
        killing = Killing(cluster, VICTIMS)
        with Screen(self._console) as screen:
            while not (self._done() and tower.done) and now_ms() < self._last_ms():
                self._cancel_next(admin)
                if not killing.under_way:
                    tower.step(self._clock(now_ms()))
                if now_ms() >= (begin_ms + end_ms) // 2:
                    killing.begin()
                screen.show(self._status(begin_ms, killing.state))
                time.sleep(TICK_S)
            killing.join()
            screen.show(self._status(begin_ms, killing.state))
        self._console.print(f"outage: {killing.state}", soft_wrap=True, highlight=False)
        if killing.failure is not None:
            raise killing.failure
        if killing.outage is not None:
            self._ledger.outages.append(killing.outage)

    def _last_ms(self) -> float:
        return max(self._ledger.due_ms.values()) + GRACE_S * 1000

    def _cancel_next(self, admin: Admin) -> None:
        until_ms = now_ms() + CANCEL_LEAD_S * 1000
        ready = [d for d in self._to_cancel if self._due[d.flight] <= until_ms]
        if not ready:
            return
        self._to_cancel = self._to_cancel[len(ready) :]
        outcomes = admin.cancel([self._handles[departure.flight] for departure in ready])
        for departure, outcome in zip(ready, outcomes, strict=True):
            if outcome.value == "cancelled":
                self._ledger.cancel(departure.flight)

    def _done(self) -> bool:
        expected = len(self._ledger.due_ms) - len(self._ledger.cancelled)
        return not self._to_cancel and all(n >= expected for n in self._delivered().values())

    def _delivered(self) -> dict[str, int]:
        """Different flights that each group has received; repeats do not count."""
        return {
            group: len({delivery.flight for delivery in list(deliveries)})
            for group, deliveries in self._ledger.deliveries.items()
        }

    def _status(self, begin_ms: int, note: str) -> Status:
        ledger = self._ledger
        delivered = self._delivered()
        late = [
            float(delivery.received_ms - ledger.due_ms.get(delivery.flight, delivery.received_ms))
            for delivery in list(ledger.deliveries["board"])
            if not ledger.kept_back(delivery.flight, self._airports[delivery.flight])
        ]
        elapsed_ms = max(0, now_ms() - begin_ms)
        return Status(
            clock=self._clock(now_ms()),
            elapsed_s=elapsed_ms / 1000,
            accepted=len(ledger.due_ms),
            pending=len(ledger.due_ms) - len(ledger.cancelled) - min(delivered.values()),
            cancelled=len(ledger.cancelled),
            delivered=delivered,
            lateness=summary(late),
            note=note,
        )

    def _clock(self, at_ms: int) -> str:
        """The day's time at a moment."""
        elapsed_ms = max(0, at_ms - min(self._due.values()))
        first = min(departure.minute for departure in self._departures)
        return clock(first + round(elapsed_ms * self._options.speed / 60_000))

    def _length_s(self) -> float:
        return (max(self._due.values()) - min(self._due.values())) / 1000

    # -- after the day ------------------------------------------------------------------------

    def _report(self, nameserver: str) -> None:
        self._console.print("The Spark report of the day's traces …")
        output = self._options.directory / "report"
        command = [sys.executable, "-m", "duemq_analytics", "report"]
        command += ["--nameserver", nameserver, "--output", str(output)]
        # Spark and Java talk a lot on standard error; it is shown when they fail.
        with (self._options.directory / "report.log").open("w+", encoding="utf-8") as log:
            done = subprocess.run(
                command,
                env=safe_path.environment(os.environ),
                stderr=log,
                check=False,
                timeout=REPORT_TIMEOUT_S,
            )
            if done.returncode:
                log.seek(0)
                raise ReportFailed(log.read().strip()[-REPORT_ERROR_CHARS_MAX:])

    def _read_log(self, nameserver: str) -> None:
        self._ledger.stored = [
            LoggedMessage(
                message.key or "",
                message.store_ms,
                message.properties.get("gate"),
                message.tag or "",
            )
            for message in read_topic(nameserver, TOPIC)
        ]


def sentences(audit: Audit) -> list[str]:
    """The verdict for people."""
    return [
        f"accepted {audit.accepted:,} = cancelled {audit.cancelled:,} + delivered "
        + ", ".join(f"{g.delivered:,} to {g.group} ({g.repeated} repeated)" for g in audit.groups),
        f"changed on the way: {audit.moved} flights to another time, {audit.gates} gates",
        f"in the topic's log: {audit.stored:,}",
        *_account(audit.count),
        f"reminders: {audit.reminders}, one every 5 s",
        f"lateness outside the outage: {_lateness(audit.lateness_outside)}",
        f"lateness inside the outage:  {_lateness(audit.lateness_inside)}",
        f"lateness in the ground stop: {_lateness(audit.lateness_stopped)}",
    ]


def _account(count: TimerCount | None) -> list[str]:
    if count is None:
        return []
    names = ("pending", "fired", "cancelled", "replaced", "dropped")
    parts = " + ".join(f"{name} {getattr(count, name):,}" for name in names)
    return [f"the timer service's account: accepted {count.accepted:,} = {parts}"]


def _lateness(figures: dict[str, float]) -> str:
    if not figures:
        return "no message was due"
    return "  ".join(
        f"{name.removesuffix('_ms')} {value:.0f} ms" for name, value in figures.items()
    )
