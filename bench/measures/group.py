"""`duemq bench group`: a group of processes drains a backlog, a callback a message."""

from __future__ import annotations

import time

from duemq_server.bench.harness import floors
from duemq_server.bench.harness.crew import Crew
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import fill

SESSION_TIMEOUT_S = 10.0


def run(
    target: Target, report: Report, *, members: int, queues: int, count: int, size: int
) -> None:
    """Fills a topic, then measures from the members' joining to the last message."""
    topic = target.new_spread_topic("group", queues)
    fill(target.nameserver, topic, count, size)
    with Crew(
        target.nameserver,
        topic,
        members=members,
        count=count,
        session_timeout_s=SESSION_TIMEOUT_S,
        timed=False,
    ) as crew:
        cpu = CpuMeter(target.cluster, crew.pids(members))
        began = time.perf_counter()
        crew.join(crew.members)
        seconds = crew.wait(count) - began
        report.figures["msgs_per_s"] = round(count / seconds)
        report.figures |= cpu.figures(count)
        report.figures["by_member"] = [member.tally.total for member in crew.members]
        report.figures |= crew.figures(count)
    floor = floors.decoded_reads_by(members, target.directory, size, count // members)
    report.floor(floor.msgs_per_s)
