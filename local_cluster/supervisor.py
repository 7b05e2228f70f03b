"""The supervisor: it owns the child processes of an embedded cluster.

One thread, `duemq-supervisor`, starts them, hears of their deaths, starts them again
(`restarts.RestartPolicy`) and stops them.  A second thread a child, `watch-<member>`, reads the
child's standard output to its end and reports to the first; it owns nothing.

    state of a member        STOPPED ── start ──► STARTING ── "listening" ──► UP
                                ▲                    │                         │
                                └─ stop, held        └────────── death ────────┤
                                                                               ▼
                             FAILED ◄── too many deaths ── (policy) ──► PAUSED ─► STARTING

A child that does not drain in `DRAIN_TIMEOUT_S` is killed; its data survive that by design.  A
replica that leads no more replaces the image of its process, and says "listening" once more.
"""

from __future__ import annotations

import contextlib
import enum
import json
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from duemq_server.local_cluster.layout import Layout
from duemq_server.local_cluster.restarts import RestartPolicy

DRAIN_TIMEOUT_S = 20.0
# Of a fork, on a machine that may be very busy.
START_TIMEOUT_S = 30.0


class ClusterFailed(Exception):
    """A member could not be started, or died too often."""


class CalledOff(Exception):
    """Whoever started the cluster wants it no more."""


@dataclass(frozen=True)
class ClusterEvent:
    """Something that happened to a member or to the cluster.

    `event` is one of started, reopened, died, restarted, moved, unsaved, killed, failed, ready,
    stopping, stopped.
    """

    event: str
    details: Mapping[str, Any] = field(default_factory=dict)


class ChildState(enum.Enum):
    """Of a member; see the module."""

    STOPPED = "stopped"
    STARTING = "starting"
    UP = "up"
    PAUSED = "paused"
    FAILED = "failed"


@dataclass
class ChildPlace:
    """A child process, or the place of one.

    `name` is <kind>-<number>, of a replica <kind>-<number>/<replica>; `group` is the part that
    clients know.
    """

    name: str
    kind: str
    group: str = ""
    replica: str = ""
    """Its name in the group; empty: the member has no replicas."""
    state: ChildState = ChildState.STOPPED
    address: str = ""
    metrics: str = ""
    """Where its metrics page listens; empty: nowhere."""
    process: subprocess.Popen[bytes] | None = None
    # Counts the starts; reports of earlier lives are dropped.
    life: int = 0
    start_at_ms: int = 0
    # Stopped on request: a death is no surprise and is not answered.
    held: bool = False
    stopped: Future[int] | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)


class Supervisor:
    """See the module.  Add the members, then `start`; all methods are for other threads."""

    def __init__(
        self,
        layout: Layout,
        command: Callable[[ChildPlace], list[str]],
        environment: Mapping[str, str],
        on_event: Callable[[ClusterEvent], None],
    ) -> None:
        """`on_event` is called from the thread, too; it must not block."""
        self.members: dict[str, ChildPlace] = {}
        self.failed: ClusterFailed | None = None
        """Set once a member was given up."""
        self.stopping = threading.Event()
        """No death is answered any more."""
        self._layout = layout
        self._command = command
        self._environment = environment
        self._on_event = on_event
        # Bounded by its senders: few reports a child's life and one call a caller at a time.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread

    def start(self) -> None:
        """Starts the thread; no member yet."""
        self._thread = threading.Thread(target=self._supervise, name="duemq-supervisor")
        self._thread.start()

    def end(self) -> None:
        """Ends the thread, once all members are stopped."""
        self._inbox.put(self._end)
        self._thread.join()

    def emit(self, event: str, **details: Any) -> None:
        """Tells of an event."""
        self._on_event(ClusterEvent(event, details))

    def start_member(self, name: str) -> None:
        """Starts a member that does not run.  Raises OSError."""
        started: Future[int] = Future()

        def start(member: ChildPlace) -> Future[int]:
            self._spawn(member)
            started.set_result(0)
            return started

        self._call(start, name).result(START_TIMEOUT_S)

    def kill(self, name: str, restart: bool) -> None:
        """kill -9; returns when the member is dead."""
        self._call(lambda member: self._kill(member, restart), name).result(DRAIN_TIMEOUT_S)

    def stop_member(self, name: str) -> int:
        """Drains a member and leaves it stopped; returns its exit code."""
        return self._call(self._drain, name).result(DRAIN_TIMEOUT_S * 2)

    def stop_members(self, names: Iterable[str]) -> None:
        """Drains members side by side; who does not drain in time is killed."""
        stops = {name: self._call(self._drain, name) for name in names}
        for name, stop in stops.items():
            try:
                stop.result(DRAIN_TIMEOUT_S)
            except TimeoutError:
                self.emit("killed", member=name, message=f"no drain in {DRAIN_TIMEOUT_S:g} s")
                self._call(lambda member: self._kill(member, False), name)
                stop.result(DRAIN_TIMEOUT_S)

    def _call(self, action: Callable[[ChildPlace], Future[int]], name: str) -> Future[int]:
        """Runs `action` on the supervisor thread; the future that it answers, flattened."""
        member = self.members[name]
        result: Future[int] = Future()

        def copy(done: Future[int]) -> None:
            result.set_result(done.result())

        def run() -> None:
            try:
                action(member).add_done_callback(copy)
            except Exception as error:
                result.set_exception(error)

        self._inbox.put(run)
        return result

    # -- in the thread ----------------------------------------------------------------------------

    def _supervise(self) -> None:
        with contextlib.suppress(_Ended):
            while True:
                action = self._next_action()
                if action is not None:
                    action()
                self._start_due()

    def _next_action(self) -> Callable[[], None] | None:
        due = [m.start_at_ms for m in self.members.values() if m.state is ChildState.PAUSED]
        timeout_s = max(0.0, (min(due) - _now_ms()) / 1000) if due else None
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _start_due(self) -> None:
        for member in self.members.values():
            if member.state is ChildState.PAUSED and member.start_at_ms <= _now_ms():
                try:
                    self._spawn(member)
                except OSError as error:  # the machine is short of something, maybe not for long
                    self._pause(member, f"not started: {error}")
                else:
                    self.emit("restarted", member=member.name, pid=_pid(member))

    def _spawn(self, member: ChildPlace) -> None:
        if member.process is not None:
            return
        member.life += 1
        member.held = False
        member.state = ChildState.STARTING
        member.policy.started(_now_ms())
        with open(self._layout.log_file(member.name), "ab") as log:
            member.process = subprocess.Popen(
                self._command(member),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                # Ctrl-C reaches the whole foreground group: it shall reach the supervisor only.
                start_new_session=True,
            )
        watch = threading.Thread(
            target=self._watch,
            args=(member, member.life, member.process),
            name=f"watch-{member.name}",
            daemon=True,
        )
        try:
            watch.start()
        except RuntimeError as error:  # no thread can be had: nobody would hear of its death
            with member.process as process:
                process.kill()
            member.process = None
            raise OSError(str(error)) from error

    def _watch(self, member: ChildPlace, life: int, process: subprocess.Popen[bytes]) -> None:
        """Thread: reports what a child says, then its end."""
        assert process.stdout is not None
        assert process.stdin is not None
        with process.stdout as lines, process.stdin:
            for line in lines:
                told = _listening_at(line)
                if told:
                    self._inbox.put(lambda t=told: self._listening(member, life, t))  # type: ignore[misc]
            code = process.wait()
        self._inbox.put(lambda: self._died(member, life, code))

    def _listening(self, member: ChildPlace, life: int, told: Mapping[str, str]) -> None:
        if life != member.life or member.process is None:
            return
        event = "reopened" if member.state is ChildState.UP else "started"
        member.state = ChildState.UP
        member.address = told["address"]
        member.metrics = told.get("metrics", "")
        self._remember(member)
        where = {"address": member.address}
        if member.metrics:
            where["metrics"] = member.metrics
        self.emit(event, member=member.name, pid=_pid(member), **where)

    def _remember(self, member: ChildPlace) -> None:
        """A full disk costs the next start a port, and this cluster nothing."""
        try:
            self._layout.remember(member.name, _port_of(member.address))
            if member.metrics:
                self._layout.remember(metrics_name(member.name), _port_of(member.metrics))
        except OSError as error:
            message = f"its port is not written down, the next start may choose another: {error}"
            self.emit("unsaved", member=member.name, message=message)

    def _died(self, member: ChildPlace, life: int, code: int) -> None:
        if life != member.life:
            return
        pid = _pid(member)
        member.process = None
        member.state = ChildState.STOPPED
        wanted = member.stopped is not None
        if member.stopped is not None:
            member.stopped.set_result(code)
            member.stopped = None
        if member.held or self.stopping.is_set():
            return
        self.emit("died", member=member.name, pid=pid, reason=_reason(code))
        self._pause(member, _reason(code), wanted=wanted)

    def _pause(self, member: ChildPlace, reason: str, *, wanted: bool = False) -> None:
        """Before it is started again, unless it needs a person.  `wanted`: it was killed."""
        start_at_ms = member.policy.died(_now_ms(), wanted=wanted)
        if start_at_ms is None:
            self._give_up(member, reason)
        else:
            member.state = ChildState.PAUSED
            member.start_at_ms = start_at_ms

    def _give_up(self, member: ChildPlace, reason: str) -> None:
        member.state = ChildState.FAILED
        message = f"{member.name} keeps dying ({reason}); see {self._layout.log_file(member.name)}"
        self.failed = ClusterFailed(message)
        self.emit("failed", member=member.name, message=message)

    def _kill(self, member: ChildPlace, restart: bool) -> Future[int]:
        member.held = not restart
        if member.held:
            self._wait_no_more(member)
        return self._signal(member, signal.SIGKILL)

    def _drain(self, member: ChildPlace) -> Future[int]:
        member.held = True
        self._wait_no_more(member)
        return self._signal(member, signal.SIGTERM)

    def _wait_no_more(self, member: ChildPlace) -> None:
        """It is not started again."""
        if member.state in (ChildState.PAUSED, ChildState.FAILED):
            member.state = ChildState.STOPPED

    def _signal(self, member: ChildPlace, number: signal.Signals) -> Future[int]:
        if member.process is None:
            done: Future[int] = Future()
            done.set_result(0)
            return done
        if member.stopped is None:
            member.stopped = Future()
        member.process.send_signal(number)
        return member.stopped

    def _end(self) -> None:
        raise _Ended


class _Ended(Exception):
    """The supervisor thread's work is done."""


def metrics_name(member: str) -> str:
    """Under which the layout remembers the port of a member's metrics."""
    return f"metrics-{member}"


def _port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def _listening_at(line: bytes) -> dict[str, str]:
    """What a child tells of its addresses; empty: another line."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    if isinstance(message, dict) and message.get("event") == "listening":
        return {key: str(message[key]) for key in ("address", "metrics") if key in message}
    return {}


def _reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # most of real time have no name
        return f"signal {-code}"


def _pid(member: ChildPlace) -> int:
    return member.process.pid if member.process is not None else 0


def _now_ms() -> int:
    """Of a clock that nobody sets: a dead member would wait for as long as one is set back."""
    return time.monotonic_ns() // 1_000_000
