"""What is done to a consumer group while it works: a schedule from a seed, and who carries it out.

`schedule` is pure; the same seed gives the same schedule (when what happens in a process is not the
seed's to say).  `Group` runs the members, `Disturber` carries a schedule out and records it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duemq.protocol import balance
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import WAIT_S, leader_of, until

MEMBERS_FIRST, MEMBERS_MIN, MEMBERS_MAX = 3, 1, 5
SESSION_TIMEOUT_S = 2.0
# Of a pause: shorter and longer than the session, and than a broker's registration (1.5 s).
PAUSE_S_MIN, PAUSE_S_MAX = 0.2, 4.0
STEP_S_MIN, STEP_S_MAX = 0.3, 2.5
# Steps wait for brokers to come back: a schedule may take so much longer, then it is cut off.
OVERTIME = 1.3
# Between them half of the steps; a broker that is away disturbs everything at once.
WEIGHTS = {
    "join": 4,
    "leave": 4,
    "kill member": 4,
    "pause member": 5,
    "replace member": 2,
    "supplant member": 2,
    "kill broker": 1,
    "restart broker": 1,
    "kill coordinator": 2,
    "pause broker": 1,
    "pause coordinator": 2,
    "kill timer": 1,
    "kill nameserver": 1,
}


@dataclass(frozen=True)
class Step:
    """`wait_s` after the step before; `draw` chooses among those that it can happen to."""

    wait_s: float
    what: str
    draw: float
    pause_s: float


def schedule(seed: object, seconds: float, allowed: Mapping[str, int] = WEIGHTS) -> list[Step]:
    """What happens within `seconds`, or later where a step has to wait for a broker."""
    randomness = random.Random(str(seed))
    steps, at_s = [], 0.0
    while True:
        wait_s = randomness.uniform(STEP_S_MIN, STEP_S_MAX)
        at_s += wait_s
        if at_s >= seconds:
            return steps
        (what,) = randomness.choices(list(allowed), list(allowed.values()))
        pause_s = randomness.uniform(PAUSE_S_MIN, PAUSE_S_MAX)
        steps.append(Step(wait_s, what, randomness.random(), pause_s))


def brokers_of(cluster: EmbeddedCluster) -> list[str]:
    """As clients know them: with replicas or without."""
    return sorted({name.partition("/")[0] for name in cluster.names("broker")})


class Journal:
    """The driver's own part of the history; from any thread."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")
        self._lock = threading.Lock()  # guards _file

    def add(self, event: str, **fields: object) -> None:
        with self._lock:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")

    def now(self, event: str, **fields: object) -> None:
        self.add(event, at=time.monotonic_ns(), **fields)

    def close(self) -> None:
        self._file.close()


class Group:
    """The members of one group: processes that record themselves; a context manager."""

    def __init__(self, directory: Path, journal: Journal, plan: Mapping[str, Any]) -> None:
        """`plan`: what `recording_member` takes.

        With `static`, each gets a `member_name`; `calls` lists how callbacks are called, member
        after member.
        """
        self._directory = directory
        self._journal = journal
        self._plan = plan
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        self._places: dict[str, str] = {}
        self._started = 0
        self._lock = threading.Lock()  # guards the three above

    def __enter__(self) -> Group:
        for _ in range(MEMBERS_FIRST):
            self.join()
        return self

    def __exit__(self, *exception: object) -> None:
        for name in self.names:
            self.kill(name)

    @property
    def names(self) -> list[str]:
        """Members that were started and not ended."""
        with self._lock:
            return sorted(self._members)

    @property
    def files(self) -> list[Path]:
        """What the members recorded."""
        return sorted(self._directory.glob("member-*.jsonl"))

    def join(self, in_place_of: str | None = None) -> None:
        """One more member; with static membership perhaps under the name of another."""
        with self._lock:
            name = f"member-{self._started:03}"
            self._started += 1
            place = self._places.get(in_place_of or "", f"place-{self._started}")
            self._places[name] = place
            plan = {
                **self._plan,
                "member_name": place if self._plan["static"] else None,
                "calls": self._plan["calls"][self._started % len(self._plan["calls"])],
            }
            self._journal.now("began", member=name, place=plan["member_name"])
            command = [sys.executable, "-m", "tests.cluster.recording_member"]
            command += [str(self._directory / f"{name}.jsonl"), name, json.dumps(plan)]
            with open(self._directory / f"{name}.log", "wb") as log:
                self._members[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log
                )

    def leave(self, name: str) -> None:
        """A clean end.  The test fails if the member's process does."""
        with self._lock:
            process = self._members.pop(name)
        until((self._directory / f"{name}.jsonl").exists)  # from then on it knows the signal
        process.terminate()
        code = _ended(process)
        log = (self._directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        assert code == 0, f"{name} ended with {code}:\n{log[-4_000:]}"

    def kill(self, name: str) -> None:
        """kill -9, paused or not."""
        with self._lock:
            process = self._members.pop(name)
        self._journal.now("killed", member=name)
        process.kill()
        _ended(process)

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self._journal.now("paused", member=name)
        self._members[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self._members[name].send_signal(signal.SIGCONT)


def _ended(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    with process.stdin:  # open until the end: a member ends with it
        return process.wait(WAIT_S)


class Disturber(threading.Thread):
    """Carries a schedule out.  Whoever is paused goes on in the end."""

    def __init__(
        self, steps: list[Step], cluster: EmbeddedCluster, group: Group, name: str, journal: Journal
    ) -> None:
        """`name`: the group's."""
        super().__init__(name="disturber")
        self._steps = steps
        self._cluster = cluster
        self._group = group
        self._group_name = name
        self._journal = journal
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._away: set[str] = set()  # members and brokers that are paused, or not yet back
        self._leaving: list[threading.Thread] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error
        finally:
            for _, action in self._later:
                action()
            for leaving in self._leaving:
                leaving.join()

    def _run(self) -> None:
        late = time.monotonic() + OVERTIME * sum(step.wait_s for step in self._steps)
        for step in self._steps:
            if time.monotonic() > late:
                break
            self._wait_until(time.monotonic() + step.wait_s)
            self._take(step)
        while self._later:  # what is done later may bring more
            self._wait_until(max(at_s for at_s, _ in self._later))

    def _wait_until(self, at_s: float) -> None:
        """Sleeps, and does what is due meanwhile."""
        while self._later and min(self._later, key=lambda each: each[0])[0] <= at_s:
            due = min(self._later, key=lambda each: each[0])
            time.sleep(max(0.0, due[0] - time.monotonic()))
            self._later.remove(due)
            due[1]()
        time.sleep(max(0.0, at_s - time.monotonic()))

    def _take(self, step: Step) -> None:
        members = [name for name in self._group.names if name not in self._away]
        verb, _, kind = step.what.partition(" ")
        if step.what == "join":
            if len(members) < MEMBERS_MAX:
                self._group.join()
        elif kind in ("", "member"):
            if len(members) > MEMBERS_MIN:
                self._take_member(verb, members[int(step.draw * len(members))], step.pause_s)
        elif kind in ("timer", "nameserver"):
            for name in self._cluster.names(kind):
                self._cluster.kill(name)
        elif not self._away.intersection(brokers := brokers_of(self._cluster)):  # one at a time
            broker = brokers[int(step.draw * len(brokers))]
            if kind == "coordinator":
                broker = balance.coordinator(self._group_name, brokers) or broker
            self._take_broker(verb, broker, step.pause_s)

    def _take_member(self, verb: str, name: str, pause_s: float) -> None:
        if verb == "leave":
            self._let_leave(name)
        elif verb == "replace":  # two processes under one name, where it is static
            self._group.join(in_place_of=name)
            self._later.append((time.monotonic() + pause_s, lambda: self._let_leave(name)))
            self._away.add(name)
        elif verb == "kill":
            self._group.kill(name)
            self._group.join(in_place_of=name)  # as an orchestrator would
        else:
            self._group.pause(name)
            self._away.add(name)
            resume_s = time.monotonic() + pause_s
            self._later.append((resume_s, lambda: self._resume(name, verb == "supplant")))
            if verb == "supplant":  # taken for dead, it wakes beside its successor
                self._group.join(in_place_of=name)

    def _resume(self, name: str, supplanted: bool) -> None:
        self._group.resume(name)
        if supplanted:
            leave_s = time.monotonic() + SESSION_TIMEOUT_S
            self._later.append((leave_s, lambda: self._let_leave(name)))
        else:
            self._away.discard(name)

    def _let_leave(self, name: str) -> None:
        """In a thread: it waits for brokers that may be paused."""
        self._away.add(name)
        leaving = threading.Thread(target=self._leave, args=(name,))
        self._leaving.append(leaving)
        leaving.start()

    def _leave(self, name: str) -> None:
        try:
            self._group.leave(name)
        except BaseException as error:
            self.error = error

    def _take_broker(self, verb: str, name: str, pause_s: float) -> None:
        """The process that leads, where it has replicas."""
        begin = time.monotonic_ns()
        self._away.add(name)
        member = leader_of(self._cluster, name)
        if verb == "kill":
            self._cluster.kill(member)
            back_s = 0.0
        elif verb == "restart":  # cleanly
            self._cluster.stop_member(member)
            self._cluster.start_member(member)
            back_s = 0.0
        else:
            pid = self._cluster.processes[member]
            os.kill(pid, signal.SIGSTOP)
            back_s = pause_s

        def back() -> None:
            if verb == "pause":
                os.kill(pid, signal.SIGCONT)
            self._cluster.wait_ready()
            self._away.discard(name)
            # Its members' sessions and requests settle within a session timeout.
            settled = time.monotonic_ns() + int(SESSION_TIMEOUT_S * 1e9)
            self._journal.add("shaken", broker=name, verb=verb, at=begin, until=settled)

        self._later.append((time.monotonic() + back_s, back))
