"""`duemq bench catch-up`: what sends feel of a replica that gets everything anew.

Needs a cluster of its own, whose broker has replicas.  Its log is filled; then messages are sent
one at a time at a steady rate while all replicas are in sync (`calm_…`), while one that follows is
dead (`away_…`), and while it catches up with an empty directory (`catching_up_…`), until it is in
sync.  p99_ratio: of catching up to calm.  caught_up_s is from the start of its process;
catch_up_mb_per_s what came into its log in that time, in 10^6 bytes.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple, Self

from duemq import Producer
from duemq.errors import InvalidArgument, Timeout
from duemq.settings import ProducerSettings
from duemq_server.bench.harness.arrivals import number_of
from duemq_server.bench.harness.pace import paced
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.bench.harness.traffic import bodies, fill
from duemq_server.broker.store.recovery import LOG_DIRECTORY
from duemq_server.local_cluster import EmbeddedCluster

GROUP = "broker-0"
COUNT_MAX = 10_000_000
# The first sends connect, and warm up.
WARM_UP_S = 1.0
WHOLE_S = 600.0
SEND_TIMEOUT_S = 60.0


class _Send(NamedTuple):
    began_s: float
    took_ms: float


class _Sends(threading.Thread):
    """One at a time, at a rate, until its context ends."""

    def __init__(self, nameserver: str, topic: str, rate: int, size: int) -> None:
        super().__init__(name="sends")
        self.done: list[_Send] = []
        self._nameserver = nameserver
        self._topic = topic
        self._rate = rate
        self._size = size
        self._end = threading.Event()
        self._failed: BaseException | None = None

    def run(self) -> None:
        settings = ProducerSettings(send_timeout_s=SEND_TIMEOUT_S)
        try:
            with Producer(self._nameserver, settings=settings) as producer:
                pace = paced(self._rate, COUNT_MAX)
                for _, body in zip(pace, bodies(COUNT_MAX, self._size), strict=True):
                    if self._end.is_set():
                        return
                    began_s = time.perf_counter()
                    producer.send(self._topic, body)
                    self.done.append(_Send(began_s, (time.perf_counter() - began_s) * 1000))
        except BaseException as error:
            self._failed = error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self.join()

    def figures(self, phase: str, since_s: float) -> dict[str, float]:
        """Of what was sent since then.  Raises what ended it, and Timeout if nothing was."""
        if self._failed is not None:
            raise self._failed
        took = [each.took_ms for each in self.done if each.began_s >= since_s]
        if not took:
            raise Timeout(f"nothing was acknowledged in the phase {phase!r}")
        return {f"{phase}_{name}": value for name, value in summary(took).items()}


def run(
    target: Target,
    report: Report,
    *,
    log_bytes: int,
    rate: int,
    seconds: float,
    size: int,
    min_insync: int,
    catch_up_rate: int,
) -> None:
    """Empties a follower's directory.  The brokers were told the last two."""
    cluster = target.cluster
    assert cluster is not None
    leader = cluster.leader(GROUP)
    followers = sorted(set(cluster.replicas(GROUP)) - {leader})
    enough = min_insync or (len(followers) + 1) // 2 + 1
    if len(followers) < enough:
        raise InvalidArgument(
            f"replicas must be more than min_insync, {enough}: nothing is accepted while one is"
            " dead",
            field="replicas",
            limit=enough + 1,
        )
    fill(target.nameserver, target.new_topic("backlog"), log_bytes // size, size)
    topic = target.new_topic("catch-up")
    with _Sends(target.nameserver, topic, rate, size) as sends:
        time.sleep(WARM_UP_S)
        report.figures |= _phase(sends, "calm", seconds)
        cluster.kill(followers[0], restart=False)
        shutil.rmtree(cluster.data_dir(followers[0]))
        report.figures |= _phase(sends, "away", seconds)
        report.figures |= _catching_up(cluster, sends, followers[0])
    figures = report.figures
    figures["p99_ratio"] = round(figures["catching_up_p99_ms"] / figures["calm_p99_ms"], 2)
    stored = Counter(number_of(each.body) for each in read_topic(target.nameserver, topic))
    figures["sent"] = len(sends.done)
    figures["lost"] = sum(not stored[number] for number in range(len(sends.done)))
    figures["twice"] = stored.total() - len(stored)


def _phase(sends: _Sends, name: str, seconds: float) -> dict[str, float]:
    began_s = time.perf_counter()
    time.sleep(seconds)
    return sends.figures(name, began_s)


def _catching_up(cluster: EmbeddedCluster, sends: _Sends, name: str) -> dict[str, float]:
    began_s = time.perf_counter()
    cluster.start_member(name)
    cluster.wait_ready(WHOLE_S)
    took_s = time.perf_counter() - began_s
    figures = sends.figures("catching_up", began_s)
    came = _bytes_in(cluster.data_dir(name) / LOG_DIRECTORY)
    return {
        **figures,
        "caught_up_s": round(took_s, 1),
        "catch_up_mb_per_s": round(came / took_s / 1e6, 1),
    }


def _bytes_in(directory: Path) -> int:
    """On the disk: segments are allocated as a whole."""
    return sum(each.stat().st_blocks * 512 for each in directory.iterdir())
