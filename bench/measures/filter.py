"""`duemq bench filter`: how fast a broker looks through messages that a filter leaves out.

`msgs_per_s` counts what was looked at, taken or not.  `read_bytes_per_msg` is what the brokers'
processes read meanwhile, a message: 32 bytes of index, and no body, where tags are the filter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from duemq import Outgoing, Producer, PullConsumer, Sql
from duemq.errors import Timeout
from duemq_server.bench.harness import floors
from duemq_server.bench.harness.arrivals import NUMBER_BYTES, Arrivals, numbered
from duemq_server.bench.harness.processes import CpuMeter, read_bytes
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import STALL_S

KEPT, LEFT_OUT = "kept", "left-out"
# The number of what must not come; counted as a message that came twice.
STRANGE = 1 << 63
EXPRESSION = "grade BETWEEN 1 AND 3 AND region IN ('eu', 'us')"
POLL_S = 0.01
POLL_MESSAGES_MAX = 10_000
# Before the clock runs, one pull sets everything up.
WARM_UP_S = 0.5


def run(target: Target, report: Report, *, by: str, keep: int, count: int, size: int) -> None:
    """Fills a topic, then measures until all of it was looked at."""
    topic = target.new_topic("filter")
    with Producer(target.nameserver) as producer:
        producer.send_many(topic, _messages(by, keep, count, size))
    arrivals = Arrivals(-(-count // keep))
    with PullConsumer(nameserver=target.nameserver) as reader:
        reader.assign(topic, filter=KEPT, start_from="latest")
        reader.poll(WARM_UP_S)
        cpu, read = CpuMeter(target.cluster), _brokers_read(target)
        began = time.perf_counter()
        reader.assign(topic, filter=KEPT if by == "tag" else Sql(EXPRESSION), start_from="earliest")
        _drain(reader, arrivals, count)
        seconds = time.perf_counter() - began
    report.figures["msgs_per_s"] = round(count / seconds)
    report.figures["seconds"] = round(seconds, 3)
    if target.cluster is not None:
        read_per_msg = (_brokers_read(target) - read) / count
        report.figures["read_bytes_per_msg"] = round(read_per_msg, 1)
    report.figures["cpu_us_per_msg"] = cpu.us_per(count)
    if by == "tag":
        floor = floors.indexed_reads(target.directory, size, count, keep)
    else:
        floor = floors.decoded_reads(target.directory, size, count)
    report.floor(floor.msgs_per_s)
    report.figures |= {"kept": arrivals.total, "lost": arrivals.lost, "twice": arrivals.twice}


def _messages(by: str, keep: int, count: int, size: int) -> Iterator[Outgoing]:
    filler = os.urandom(size - NUMBER_BYTES)
    for number in range(count):
        kept = number % keep == 0
        body = numbered(number // keep if kept else STRANGE, filler)
        if by == "tag":
            yield Outgoing(body, tag=KEPT if kept else LEFT_OUT)
        else:
            grade = 2 if kept else 4 + number % 100
            yield Outgoing(body, properties={"region": "eu", "grade": str(grade), "shop": "s-17"})


def _drain(reader: PullConsumer, arrivals: Arrivals, count: int) -> None:
    """Until the reader is past all.  Raises Timeout when it does not get on."""
    place, since = 0, time.monotonic()
    while place < count:
        arrivals.add(message.body for message in reader.poll(POLL_S, POLL_MESSAGES_MAX))
        before, place = place, sum(map(reader.position, reader.assignment))
        if place > before:
            since = time.monotonic()
        elif time.monotonic() - since > STALL_S:
            raise Timeout(f"stands at {place:,} of {count:,} messages for {STALL_S:g} s")


def _brokers_read(target: Target) -> int:
    if target.cluster is None:
        return 0
    processes = target.cluster.processes
    return sum(read_bytes(pid) for name, pid in processes.items() if name.startswith("broker"))
