"""Clients of two releases at work on a mixed cluster, each a process, and the judgement."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from duemq import Admin, Producer
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.checker import Event, dump, judge
from tests.cluster.harness import WAIT_S, topic_name, until
from tests.cluster.history import History
from tests.cluster.replicated import status
from tests.skew.releases import Release
from tests.skew.tending import topics_of
from tests.skew.tending_checker import faults

MODULE = "tests.skew.client"
QUEUES = 4
GOES_ON_S = 90.0
BALLAST_BODY_BYTES = 64 << 10
BALLAST_BYTES = 16 << 20
"""More than a timer service keeps of its log (small_logs.py)."""


def ballast(cluster: EmbeddedCluster, shard: str) -> None:
    """Timers that wait for long, and so many that the shard's log is cut: with their bodies.

    A replica of the shard that is new needs a snapshot then.
    """
    until(lambda: bool(cluster.leader(shard)))
    with Producer(cluster.nameserver) as producer:
        sent = [
            producer.submit(
                "ballast", bytes(BALLAST_BODY_BYTES), delay="30d", timer_key=f"{number}"
            )
            for number in range(BALLAST_BYTES // BALLAST_BODY_BYTES)
        ]
        for each in sent:
            each.result(WAIT_S)
    until(lambda: status(cluster, cluster.leader(shard) or cluster.names("timer")[0]).log_start > 0)


class Load:
    """In each release a sender, a member of a group, and who tends schedules, holds and jobs.

    Use `at_work`.
    """

    def __init__(self, cluster: EmbeddedCluster, directory: Path) -> None:
        self.topic = topic_name()
        self._cluster = cluster
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, what: str, release: Release) -> None:
        """What: send, consume or tend."""
        name = f"{what}-{release.name}"
        arguments = (what, self._cluster.nameserver, self.topic, str(self._file(name)), name)
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                release.python("-m", MODULE, *arguments),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._directory,
            )

    def stop(self, what: str) -> None:
        """Ends all that do so; the test fails if one did not end well."""
        names = [name for name in self._processes if name.startswith(what)]
        for name in names:
            stdin = self._processes[name].stdin
            assert stdin is not None
            stdin.close()
        for name in names:
            code = self._processes.pop(name).wait(WAIT_S * 2)
            assert code == 0, f"{name} ended with {code}:\n{self._log(name).read_text()[-4_000:]}"

    def kill(self) -> None:
        """Those that are left."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def goes_on(self) -> None:
        """Each sender has something acknowledged that it sends from now on, at once and delayed."""
        before = {name: self._sent(name) for name in self._processes if name.startswith("send")}
        for name, known in before.items():
            until(lambda n=name, k=known: self._acked_of_both_kinds(n, k), GOES_ON_S)  # type: ignore[misc]

    def tends(self) -> None:
        """Each who tends ends a round that it begins from now on."""
        begun = {name: self._rounds(name, "round begins") for name in self._tending()}
        for name, before in begun.items():
            until(lambda n=name, b=before: self._rounds(n, "round") > b, GOES_ON_S)  # type: ignore[misc]

    def _tending(self) -> list[str]:
        return [name for name in self._names() if name.startswith("tend")]

    def _rounds(self, name: str, event: str) -> int:
        return sum(each["event"] == event for each in self._read(name))

    def _sent(self, name: str) -> set[str]:
        return {event["id"] for event in self._read(name) if event["event"] == "sent"}

    def _acked_of_both_kinds(self, name: str, before: set[str]) -> bool:
        acked = [
            event["due_ms"] > 0
            for event in self._read(name)
            if event["event"] == "acked" and event["id"] not in before
        ]
        return set(acked) == {False, True}

    def events(self) -> list[Event]:
        """Of who sends and consumes; without what nobody can tell."""
        others = sorted(set(self._names()) - set(self._tending()))
        found = [event for name in others for event in self._read(name)]
        doubt = {event["id"] for event in found if event["event"] == "in doubt"}
        return [e for e in found if e["event"] != "acked" or e["id"] not in doubt]

    def tended(self) -> list[Event]:
        """Of who tends, and what their topics hold now."""
        found = [event for name in self._tending() for event in self._read(name)]
        stored = History()
        for name in self._tending():
            held, bulk, beats = topics_of(f"{self.topic}-{name}")
            for topic in (held, bulk):
                stored.stored(read_topic(self._cluster.nameserver, topic))
            for each in read_topic(self._cluster.nameserver, beats):
                at_ms = int(each.properties["duemq.scheduled_ms"])
                times = {"scheduled_ms": at_ms, "due_ms": each.due_ms, "store_ms": each.store_ms}
                stored.add("beat", beats, **times)
        return [*found, *stored.events]

    def missing(self) -> int:
        """Messages that must come and that the group has not received yet."""
        events = self.events()
        gone = {e["id"] for e in events if e.get("outcome") == "cancelled"}
        acked = {e["id"] for e in events if e["event"] == "acked"}
        received = {e["id"] for e in events if e["event"] == "received"}
        return len(acked - gone - received)

    def _names(self) -> list[str]:
        return sorted(file.stem for file in self._directory.glob("*.jsonl"))

    def _read(self, name: str) -> list[Event]:
        file = self._file(name)
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1:] == "\n"]

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.jsonl"

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"


@contextmanager
def at_work(
    cluster: EmbeddedCluster, directory: Path, releases: Sequence[Release]
) -> Iterator[Load]:
    """Clients of these releases; judged at the end."""
    load = Load(cluster, directory)
    with Admin(cluster.nameserver) as admin:
        admin.create_topic(load.topic, queues=QUEUES)
        for release in releases:
            for topic in topics_of(f"{load.topic}-tend-{release.name}"):
                admin.create_topic(topic)
    with ExitStack() as stack:
        stack.callback(load.kill)
        for what in ("consume", "send", "tend"):
            for release in releases:
                load.start(what, release)
        load.goes_on()
        yield load
        load.goes_on()
        load.tends()
        load.stop("tend")
        load.stop("send")
        cluster.wait_ready()
        until(lambda: load.missing() == 0)
        with suppress(AssertionError):  # they are named below
            until(lambda: faults(load.tended()) == [])
        load.stop("consume")
    _judge(cluster, load, directory)


def _judge(cluster: EmbeddedCluster, load: Load, directory: Path) -> None:
    tended = load.tended()
    dump(tended, directory / "tended.json")
    kinds = Counter(event["event"] for event in tended)
    print(
        f"{kinds['round']} rounds of holds and jobs, with {kinds['sent']} messages;"
        f" {kinds['beat']} messages of {kinds['planned']} schedules"
    )
    assert faults(tended) == []
    stored = History()
    stored.stored(read_topic(cluster.nameserver, load.topic))
    events = [*load.events(), *stored.events]
    dump(events, directory / "history.json")
    verdict = judge(events, [load.topic])
    outcomes = Counter(e["outcome"] for e in events if e["event"] == "cancelled")
    by = Counter(e["by"] for e in events if e["event"] == "received")
    doubts = sum(
        event["event"] == "in doubt" for name in load._names() for event in load._read(name)
    )
    failed = [event["error"] for event in events if event["event"] == "failed"]
    print(
        f"{verdict.acked} acknowledged, {verdict.stored} stored, {len(failed)} failed,"
        f" {doubts} in doubt, {dict(outcomes)}, received by {dict(by)},"
        f" repeated {verdict.repeated}, at most {verdict.late_max_ms} ms late"
    )
    for error in sorted(set(failed))[:5]:
        print("   ", error[:300])
    assert verdict.faults == []
    assert "unknown" not in outcomes
    with Admin(cluster.nameserver) as admin:
        described = admin.describe_group(load.topic)
    assert described.lag == 0
