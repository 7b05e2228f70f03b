"""`duemq bench rebalance`: what joins, leaves and a death of members cost a steady stream.

p50_ms, p99_ms, max_ms: from `submit` to the callback, at a steady rate, while a member joins or
leaves every `every_s`.  leave_ms, death_ms: from the member's being told to leave, or its kill -9,
to the first message of one of its queues at another member; …_all_ms: until all of its queues had
one, which at a low rate is mostly the wait for a message.  repeated: after the kill, from the dead
member's uncommitted tail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from duemq import Producer
from duemq_server.bench.harness import floors
from duemq_server.bench.harness.crew import Crew, CrewMember
from duemq_server.bench.harness.pace import paced
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import bodies

# Connecting and warming up; sent and counted, and not measured.
WARM_UP_S = 2.0
# Between the last change and the kill, and from the end of the dead member's session on.
REST_S = 2.0
# A member that leaves has its queues by what it received within this time.
RECENT_NS = 1_000_000_000
FLOOR_COUNT = 2_000
NS_PER_MS = 1e6


@dataclass(frozen=True)
class Parted:
    """A member that gave its queues up, and when it was made to."""

    member: CrewMember
    at_ns: int


def run(
    target: Target,
    report: Report,
    *,
    members: int,
    queues: int,
    rate: int,
    seconds: float,
    every_s: float,
    session_timeout_s: float,
    size: int,
) -> None:
    """Sends at `rate`; lets members join and leave for `seconds`, then kills one."""
    topic = target.new_spread_topic("rebalance", queues)
    until_kill_s = WARM_UP_S + seconds + REST_S
    count = int(rate * (until_kill_s + session_timeout_s + REST_S))
    guests = int(seconds / every_s / 2) + 1
    with (
        Crew(
            target.nameserver,
            topic,
            members=members + guests,
            count=count,
            session_timeout_s=session_timeout_s,
            timed=True,
        ) as crew,
        Producer(target.nameserver) as producer,
    ):
        crew.join(crew.members[:members])
        cpu = CpuMeter(target.cluster, crew.pids(members))
        stream = _Stream(producer, topic, rate, count, size)
        left = _change(crew.members[members:], stream, seconds, every_s)
        stream.send_until(until_kill_s)
        producer.flush()
        crew.wait(stream.sent)
        report.figures |= cpu.figures(stream.sent)
        calm = crew.figures(stream.sent)
        victim = crew.members[0]
        killed = Parted(victim, time.perf_counter_ns())
        victim.kill()
        stream.send_until(count / rate)
        producer.flush()
        crew.wait_for_each(count)
        report.figures["msgs_per_s"] = rate
        measured = range(int(rate * WARM_UP_S), int(rate * (WARM_UP_S + seconds)))
        report.figures |= summary(_latencies_ms(crew, stream, measured))
        _enter_handovers(report, crew, left, killed)
        after = crew.figures(count)
        report.figures |= {"lost": after["lost"], "twice": calm["twice"]}
        report.figures["repeated"] = after["twice"] - calm["twice"]
    floor = floors.durable_writes(target.directory, size, 1, FLOOR_COUNT)
    report.figures |= {f"floor_{name}": value for name, value in floor.latency.items()}


class _Stream:
    """Numbered messages at a steady rate, and when each was sent."""

    def __init__(self, producer: Producer, topic: str, rate: int, count: int, size: int) -> None:
        self.sent = 0
        self.sent_ns = [0] * count
        self._producer = producer
        self._topic = topic
        self._rate = rate
        self._numbered = zip(paced(rate, count), bodies(count, size), strict=True)

    def send_until(self, at_s: float) -> None:
        """Goes on until `at_s` after the first message."""
        upto = min(int(at_s * self._rate), len(self.sent_ns))
        while self.sent < upto:
            number, body = next(self._numbered)
            self.sent_ns[number] = time.perf_counter_ns()
            self._producer.submit(self._topic, body)
            self.sent += 1


def _change(
    guests: Sequence[CrewMember], stream: _Stream, seconds: float, every_s: float
) -> list[Parted]:
    """A guest joins, leaves, the next one joins, …, while messages flow; answers who left."""
    left: list[Parted] = []
    waiting: Iterator[CrewMember] = iter(guests)
    guest: CrewMember | None = None
    for change in range(int(seconds / every_s)):
        stream.send_until(WARM_UP_S + (change + 0.5) * every_s)
        if guest is None:
            guest = next(waiting)
            guest.join()
        else:
            left.append(Parted(guest, time.perf_counter_ns()))
            guest.leave()
            guest = None
    stream.send_until(WARM_UP_S + seconds)
    return left


def _latencies_ms(crew: Crew, stream: _Stream, numbers: range) -> list[float]:
    received = [member.tally.received_ns for member in crew.members]
    return [
        (min(at for each in received if (at := each[number])) - stream.sent_ns[number]) / NS_PER_MS
        for number in numbers
    ]


def _enter_handovers(report: Report, crew: Crew, left: Sequence[Parted], killed: Parted) -> None:
    leaves = [handover_ms(crew, parted) for parted in left]
    if leaves:
        report.figures["leave_ms"] = round(max(first for first, _ in leaves), 3)
        report.figures["leave_all_ms"] = round(max(last for _, last in leaves), 3)
    first, last = handover_ms(crew, killed)
    report.figures |= {"death_ms": round(first, 3), "death_all_ms": round(last, 3)}


def handover_ms(crew: Crew, parted: Parted) -> tuple[float, float]:
    """Until one, and until every one of a member's queues had a message at another member."""
    tally = parted.member.tally
    recent = zip(tally.received_ns, tally.queues, strict=True)
    begin_ns = parted.at_ns - RECENT_NS
    queues = {queue for at_ns, queue in recent if at_ns >= begin_ns}
    first_ns: dict[int, int] = {}
    for member in crew.members:
        if member is parted.member:
            continue
        for at_ns, queue in zip(member.tally.received_ns, member.tally.queues, strict=True):
            if queue in queues and at_ns > parted.at_ns:
                first_ns[queue] = min(at_ns, first_ns.get(queue, at_ns))
    waits = [(at_ns - parted.at_ns) / NS_PER_MS for at_ns in first_ns.values()]
    return min(waits, default=0.0), max(waits, default=0.0)
