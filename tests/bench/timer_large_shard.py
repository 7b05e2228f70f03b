"""A timer shard of more than 1 GiB gets a new replica, over the real stream, and loses the old one.

    python -m tests.bench.timer_large_shard [--mib 1200] [--rate BYTES] [--directory DIRECTORY]

Prints its parameters first.  A follower is killed, and its directory removed; the shard's period
files are filled with timers of 1 MiB.  Then the follower comes with an empty disk, in a process of
its own, as does the leader.  Once it is in sync, the leader is killed for good before some timers
are due that came with the snapshot.  Fails unless the new replica needed a snapshot, fires each of
these once and not early, counts what is pending, and has the large bodies as they were; and unless
neither process ever had `--memory` bytes more in memory than when it was at rest.  It needs three
times the size on the disk, and removes that.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from duemq import Admin, Message, Producer
from duemq.settings import ProducerSettings
from duemq_server.bench.harness.processes import cpu_s, rss_mb, rss_peak_mb
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from duemq_server.storage.disk import RealDisk
from duemq_server.timer_service.disk.data_directory import load_checkpoint
from tests.cluster.harness import until
from tests.cluster.replicated import SHARD, in_sync, status

LARGE, SMALL = "large", "small"
BODY_BYTES = 1 << 20
SMALL_COUNT = 200  # more than --memtable-rows-max: they go to files, too
LOOKED_AT = 3  # large ones that are sent at the end
FAR = "30d"
DUE_AFTER_S = 60.0
"""And as long as the filling took: the small ones are due when the new replica is in sync."""
GIB = 1 << 30
WHOLE_S = 900.0
FLAGS = ("--checkpoint-interval", "1", "--memtable-rows-max", "64", "--lease-duration", "1.5")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1_200)
    parser.add_argument("--rate", type=int, default=1 << 30, help="catch_up_rate, bytes a second")
    parser.add_argument("--memory", type=int, default=128 << 20)
    parser.add_argument("--directory")
    given = parser.parse_args()
    print(
        f"{given.mib} MiB in bodies of 1 MiB, catch_up_rate {given.rate} bytes a second", flush=True
    )
    with (
        tempfile.TemporaryDirectory(dir=given.directory) as directory,
        shard(Path(directory), given.rate) as cluster,
    ):
        prove(cluster, given.mib, given.memory)


@contextmanager
def shard(directory: Path, rate: int) -> Iterator[EmbeddedCluster]:
    """Two replicas, of which one is enough."""
    flags = (*FLAGS, "--min-insync", "1", "--catch-up-rate", str(rate))
    with EmbeddedCluster(
        directory, brokers=1, replicas=2, flags={"timer": flags, "broker": ("--min-insync", "1")}
    ) as cluster:
        yield cluster


def prove(cluster: EmbeddedCluster, mib: int, memory: int) -> None:
    """See the module."""
    leader = cluster.leader(SHARD)
    (other,) = set(cluster.replicas(SHARD)) - {leader}
    with Admin(cluster.nameserver) as admin:
        admin.create_topic(LARGE)
        admin.create_topic(SMALL)
    cluster.kill(other, restart=False)
    rmtree(cluster.data_dir(other))
    due_s = fill(cluster, leader, mib)
    catch_up(cluster, leader, other, memory)
    assert time.time() < due_s, "what was to be due after the leader's death is due: less --mib"
    cluster.kill(leader, restart=False)
    print(f"{leader} is killed, {due_s - time.time():.0f} s before timers are due", flush=True)
    after_the_death(cluster, mib)


def fill(cluster: EmbeddedCluster, leader: str, mib: int) -> float:
    """Until it is in files and in a checkpoint; answers when the small ones are due."""
    began_s = time.monotonic()
    with Producer(
        cluster.nameserver, settings=ProducerSettings(send_timeout_s=WHOLE_S)
    ) as producer:
        sent = [
            producer.submit(LARGE, body_of(number), delay=FAR, timer_key=str(number))
            for number in range(mib)
        ]
        for each in sent:
            each.result(WHOLE_S)
        after_s = DUE_AFTER_S + time.monotonic() - began_s
        due_s = time.time() + after_s
        small = [
            producer.submit(SMALL, b"%d" % number, delay=after_s, timer_key=str(number))
            for number in range(SMALL_COUNT)
        ]
        for each in small:
            each.result(WHOLE_S)
    until(lambda: in_files(cluster, leader) > mib * BODY_BYTES, WHOLE_S)
    print(
        f"filled in {time.monotonic() - began_s:.0f} s: {in_files(cluster, leader) / GIB:.2f} GiB"
        f" in files; the log begins at {status(cluster, leader).log_start / GIB:.2f} GiB",
        flush=True,
    )
    return due_s


def body_of(number: int) -> bytes:
    """Of a large timer."""
    return f"{number:08}".encode() * (BODY_BYTES // 8)


def in_files(cluster: EmbeddedCluster, member: str) -> int:
    """Bytes of period files that the last checkpoint of a replica has."""
    found = load_checkpoint(str(cluster.data_dir(member)), RealDisk())
    return sum(found.lengths.values()) if found is not None else 0


def catch_up(cluster: EmbeddedCluster, leader: str, other: str, memory: int) -> None:
    """The replica with an empty disk comes, and is in sync."""
    size = in_files(cluster, leader)
    assert size > GIB, f"only {size} bytes are in files: more --mib"
    old = cluster.processes[leader]
    rest_mb, used_s = rss_mb(old), cpu_s(old)
    Path(f"/proc/{old}/clear_refs").write_text("5", encoding="ascii")  # its peak begins anew
    began_s = time.monotonic()
    cluster.start_member(other)
    new = cluster.processes[other]
    until(lambda: other in in_sync(cluster, SHARD), WHOLE_S)
    took_s = time.monotonic() - began_s
    peaks = {leader: rss_peak_mb(old), other: rss_peak_mb(new)}
    print(
        f"{other} is in sync after {took_s:.1f} s; CPU of leader {cpu_s(old) - used_s:.1f} s,"
        f" of follower {cpu_s(new):.1f} s; memory at rest {rest_mb} MB, at most {peaks} MB",
        flush=True,
    )
    assert in_files(cluster, other) > GIB, "it got no snapshot"
    assert status(cluster, other).log_start > 0
    for name, peak in peaks.items():
        assert peak * 1e6 < rest_mb * 1e6 + memory, f"{name} had {peak} MB in memory"


def after_the_death(cluster: EmbeddedCluster, mib: int) -> None:
    """Each small one comes once, and all large ones are there."""
    until(lambda: len(stored(cluster, SMALL)) >= SMALL_COUNT, WHOLE_S)
    with Producer(cluster.nameserver) as producer:
        for number in range(0, mib, mib // LOOKED_AT):
            producer.reschedule(key=(LARGE, str(number)), delay=0)
    asked = len(range(0, mib, mib // LOOKED_AT))
    until(lambda: len(stored(cluster, LARGE)) >= asked, WHOLE_S)
    with Admin(cluster.nameserver) as admin:
        [stats] = admin.timer_stats()
        until(lambda: not admin.timer_stats()[0].in_flight)
        counts = {each.topic: each for each in admin.count_timers()}
    assert stats.error is None
    small = stored(cluster, SMALL)
    assert Counter(each.body for each in small) == Counter(b"%d" % n for n in range(SMALL_COUNT))
    early = [each for each in small if each.store_ms < (each.due_ms or 0)]
    assert not early, early
    assert {each.body for each in stored(cluster, LARGE)} == {
        body_of(number) for number in range(0, mib, mib // LOOKED_AT)
    }
    assert counts[LARGE].pending == mib - asked
    assert counts[SMALL].pending == 0
    print(f"{SMALL_COUNT} were due and came once; {counts[LARGE].pending} large ones are pending")


def stored(cluster: EmbeddedCluster, topic: str) -> list[Message]:
    """All that was delivered to a topic."""
    return list(read_topic(cluster.nameserver, topic))


if __name__ == "__main__":
    main()
