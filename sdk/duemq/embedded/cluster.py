"""The supervisor of an embedded cluster.

Every member is a child process `python -m nameserver|broker|timer_service`.  One thread,
`duemq-supervisor`, owns them: it starts them, hears of their deaths, starts them again
(`restarts.RestartPolicy`) and stops them in order.  A second thread a child, `watch-<member>`,
reads the child's standard output to its end and reports to the first; it owns nothing.

    state of a member        STOPPED ── start ──► STARTING ── "listening" ──► UP
                                ▲                    │                         │
                                └─ stop, held        └────────── death ────────┤
                                                                               ▼
                             FAILED ◄── too many deaths ── (policy) ──► PAUSED ─► STARTING

Stopping goes against the stream of messages' dependence: timer services first (they send to
brokers), then brokers, then nameservers.  A child that does not drain in `DRAIN_TIMEOUT_S` is
killed; its data survive that by design.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import tenacity

from duemq.embedded.layout import Layout, port_is_free
from duemq.embedded.restarts import RestartPolicy
from duemq.errors import InvalidArgument
from duemq.v1 import nameserver_pb2, nameserver_pb2_grpc

BROKERS_DEFAULT = 2
BROKERS_MAX = 16
# A nameserver spends 1 to 2 ms of CPU on a heartbeat: three members cost it 0.7 % of a core.
HEARTBEAT_PERIOD_S = 0.75
READY_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 20.0
READY_POLL_S = 0.05
RPC_TIMEOUT_S = 2.0
# Of a member's log, shown when it is given up.
LOG_TAIL_BYTES = 2_000

# A member's name is <kind>-<number>; its module serves it.
MODULES = {"nameserver": "nameserver", "broker": "broker", "timer": "timer_service"}
STOP_ORDER = ("timer", "broker", "nameserver")


class ClusterFailed(Exception):
    """A member could not be started, or died too often."""


@dataclass(frozen=True)
class ClusterEvent:
    """Something that happened to a member or to the cluster.

    `event` is one of started, died, restarted, moved, killed, failed, ready, stopping, stopped.
    """

    event: str
    details: Mapping[str, Any] = field(default_factory=dict)


class _State(enum.Enum):
    STOPPED = "stopped"
    STARTING = "starting"
    UP = "up"
    PAUSED = "paused"
    FAILED = "failed"


@dataclass
class _Member:
    name: str
    kind: str
    state: _State = _State.STOPPED
    address: str = ""
    process: subprocess.Popen[bytes] | None = None
    # Counts the starts; reports of earlier lives are dropped.
    life: int = 0
    start_at_ms: int = 0
    # Stopped on request: a death is no surprise and is not answered.
    held: bool = False
    stopped: Future[int] | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)


class EmbeddedCluster:
    """Runs a cluster on loopback; a context manager that starts and stops it.

    Raises from the constructor and `start`: InvalidArgument for settings that do not fit (the
    folder's lock is taken, fewer brokers than its data have, a port is taken), ClusterFailed when
    it does not come up.

    directory: where the data lie; made when missing.  A restart on it keeps data and ports.
    brokers: how many; None: as many as the folder knows, 2 for a new one.
    port: of the first nameserver; 0: the one of last time, else any free one.
    flags: more command line flags for members, by kind ("nameserver", "broker", "timer").
    on_event: called from the supervisor thread with each ClusterEvent; must not block.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        brokers: int | None = None,
        nameservers: int = 1,
        port: int = 0,
        heartbeat_period_s: float = HEARTBEAT_PERIOD_S,
        flags: Mapping[str, Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
        on_event: Callable[[ClusterEvent], None] | None = None,
    ) -> None:
        _require_services()
        self._layout = Layout(Path(directory).resolve())
        self._brokers = brokers
        self._nameservers = nameservers
        self._port = port
        self._heartbeat_period_s = heartbeat_period_s
        self._flags = dict(flags or {})
        # Members are told all by flags: settings meant for another process must not reach them.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DUEMQ_")}
        self._environment = {**inherited, **(environment or {})}
        self._on_event = on_event or (lambda event: None)
        self._members: dict[str, _Member] = {}
        # Bounded by its senders: two reports a child's life and one call a caller at a time.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._failed: ClusterFailed | None = None
        self._thread: threading.Thread | None = None

    # -- life ---------------------------------------------------------------------------------

    def __enter__(self) -> EmbeddedCluster:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Starts all members and returns when the cluster is usable."""
        self._layout.open()
        try:
            self._plan()
            self._thread = threading.Thread(target=self._supervise, name="duemq-supervisor")
            self._thread.start()
            for kind in reversed(STOP_ORDER):
                self._start_all(kind, timeout_s)
            self.wait_ready(timeout_s)
        except BaseException:
            self.stop()
            raise
        self._emit("ready", nameserver=self.nameserver, processes=self.processes)

    def stop(self) -> None:
        """Drains and stops all members.  Idempotent."""
        if self._thread is not None:
            self._emit("stopping")
            self._stopping.set()
            for kind in STOP_ORDER:
                self._stop_all(kind)
            self._inbox.put(self._end)
            self._thread.join()
            self._thread = None
            self._emit("stopped")
        self._layout.close()

    # -- what callers see ---------------------------------------------------------------------

    @property
    def nameserver(self) -> str:
        """The nameservers' addresses as clients take them: host:port, comma-separated."""
        return ",".join(self.address(name) for name in self.names("nameserver"))

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of the members that run, by name."""
        return {
            member.name: member.process.pid
            for member in self._members.values()
            if member.process is not None
        }

    @property
    def failure(self) -> ClusterFailed | None:
        """Why the cluster is no longer whole, once a member was given up."""
        return self._failed

    def names(self, kind: str) -> list[str]:
        """Names of the members of a kind: "nameserver", "broker" or "timer"."""
        return [member.name for member in self._members.values() if member.kind == kind]

    def address(self, name: str) -> str:
        """Where a member listens; it stays over restarts."""
        return self._members[name].address

    def log_file(self, name: str) -> Path:
        """A member's log."""
        return self._layout.log_file(name)

    def data_dir(self, name: str) -> Path:
        """A member's data."""
        return self._layout.data_dir(name)

    def kill(self, name: str, *, restart: bool = True) -> None:
        """kill -9.  The supervisor starts the member again unless `restart` is False."""
        self._call(lambda member: self._kill(member, restart), name).result(DRAIN_TIMEOUT_S)

    def stop_member(self, name: str) -> int:
        """Drains one member and leaves it stopped; returns its exit code."""
        return self._call(self._drain, name).result(DRAIN_TIMEOUT_S * 2)

    def start_member(self, name: str) -> None:
        """Starts a member that was stopped or killed without restart."""
        started: Future[int] = Future()

        def start(member: _Member) -> Future[int]:
            self._spawn(member)
            started.set_result(0)
            return started

        self._call(start, name).result(RPC_TIMEOUT_S)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Returns when every member that should run serves and is registered everywhere."""
        retry = tenacity.Retrying(
            stop=tenacity.stop_after_delay(timeout_s),
            wait=tenacity.wait_fixed(READY_POLL_S),
            retry=tenacity.retry_if_result(lambda missing: missing and not self._stopping.is_set()),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else "",
        )
        missing = retry(self._missing)
        if missing:
            raise ClusterFailed(f"not ready after {timeout_s:g} s: {missing}{self._log_tails()}")

    # -- the plan -----------------------------------------------------------------------------

    def _plan(self) -> None:
        known = len(self._layout.members("broker-"))
        brokers = self._brokers or known or BROKERS_DEFAULT
        if not 1 <= brokers <= BROKERS_MAX:
            raise InvalidArgument(
                f"brokers must be 1 to {BROKERS_MAX}, not {brokers}",
                field="brokers",
                value=str(brokers),
                limit=str(BROKERS_MAX),
            )
        if brokers < known:
            raise InvalidArgument(
                f"{self._layout.directory} holds data of {known} brokers: with {brokers} some of "
                "its messages would be out of reach",
                field="brokers",
                value=str(brokers),
                limit=str(known),
            )
        counts = {"nameserver": self._nameservers, "broker": brokers, "timer": 1}
        for kind, count in counts.items():
            for number in range(count):
                member = _Member(f"{kind}-{number}", kind)
                member.address = f"127.0.0.1:{self._choose_port(member.name)}"
                self._members[member.name] = member

    def _choose_port(self, name: str) -> int:
        if name == "nameserver-0" and self._port:
            if not port_is_free(self._port):
                raise InvalidArgument(
                    f"port {self._port} is taken; choose another with --port, 0 for any",
                    field="port",
                    value=str(self._port),
                )
            return self._port
        port = self._layout.port(name)
        if port and not port_is_free(port):
            self._emit("moved", member=name, from_port=port)
            return 0
        return port

    def _command(self, member: _Member) -> list[str]:
        command = [sys.executable, "-m", "duemq.embedded.child", MODULES[member.kind]]
        command += ["--listen", member.address]
        if member.kind == "nameserver":
            command += ["--ready-after", str(self._heartbeat_period_s)]
        else:
            command += ["--name", member.name, "--nameservers", self.nameserver]
            command += ["--data-dir", str(self._layout.data_dir(member.name))]
            command += ["--heartbeat-period", str(self._heartbeat_period_s)]
        return [*command, *self._flags.get(member.kind, ())]

    # -- the supervisor thread ----------------------------------------------------------------

    def _supervise(self) -> None:
        with contextlib.suppress(_Ended):
            while True:
                action = self._next_action()
                if action is not None:
                    action()
                self._start_due()

    def _next_action(self) -> Callable[[], None] | None:
        due = [m.start_at_ms for m in self._members.values() if m.state is _State.PAUSED]
        timeout_s = max(0.0, (min(due) - _now_ms()) / 1000) if due else None
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _start_due(self) -> None:
        for member in self._members.values():
            if member.state is _State.PAUSED and member.start_at_ms <= _now_ms():
                try:
                    self._spawn(member)
                except OSError as error:
                    self._give_up(member, str(error))
                else:
                    self._emit("restarted", member=member.name, pid=_pid(member))

    def _spawn(self, member: _Member) -> None:
        if member.process is not None:
            return
        member.life += 1
        member.held = False
        member.state = _State.STARTING
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
        threading.Thread(
            target=self._watch,
            args=(member, member.life, member.process),
            name=f"watch-{member.name}",
            daemon=True,
        ).start()

    def _watch(self, member: _Member, life: int, process: subprocess.Popen[bytes]) -> None:
        """Thread: reports what a child says, then its end."""
        assert process.stdout is not None
        assert process.stdin is not None
        with process.stdout as lines, process.stdin:
            for line in lines:
                address = _listening_address(line)
                if address:
                    self._inbox.put(lambda a=address: self._listening(member, life, a))  # type: ignore[misc]
            code = process.wait()
        self._inbox.put(lambda: self._died(member, life, code))

    def _listening(self, member: _Member, life: int, address: str) -> None:
        if life != member.life or member.process is None:
            return
        member.state = _State.UP
        member.address = address
        self._layout.remember(member.name, int(address.rsplit(":", 1)[1]))
        self._emit("started", member=member.name, pid=_pid(member), address=address)

    def _died(self, member: _Member, life: int, code: int) -> None:
        if life != member.life:
            return
        pid = _pid(member)
        member.process = None
        member.state = _State.STOPPED
        if member.stopped is not None:
            member.stopped.set_result(code)
            member.stopped = None
        if member.held or self._stopping.is_set():
            return
        self._emit("died", member=member.name, pid=pid, reason=_reason(code))
        start_at_ms = member.policy.died(_now_ms())
        if start_at_ms is None:
            self._give_up(member, _reason(code))
        else:
            member.state = _State.PAUSED
            member.start_at_ms = start_at_ms

    def _give_up(self, member: _Member, reason: str) -> None:
        member.state = _State.FAILED
        message = f"{member.name} keeps dying ({reason}); see {self.log_file(member.name)}"
        self._failed = ClusterFailed(message)
        self._emit("failed", member=member.name, message=message)

    def _kill(self, member: _Member, restart: bool) -> Future[int]:
        member.held = not restart
        return self._signal(member, signal.SIGKILL)

    def _drain(self, member: _Member) -> Future[int]:
        member.held = True
        if member.state in (_State.PAUSED, _State.FAILED):
            member.state = _State.STOPPED
        return self._signal(member, signal.SIGTERM)

    def _signal(self, member: _Member, number: signal.Signals) -> Future[int]:
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

    # -- calls into the supervisor thread -----------------------------------------------------

    def _call(self, action: Callable[[_Member], Future[int]], name: str) -> Future[int]:
        """Runs `action` on the supervisor thread; the future that it answers, flattened."""
        member = self._members[name]
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

    def _start_all(self, kind: str, timeout_s: float) -> None:
        """Starts the members of a kind; waits for those whose address others are told."""
        for name in self.names(kind):
            self.start_member(name)
        if kind == "nameserver":
            self._wait_addresses(kind, timeout_s)

    def _wait_addresses(self, kind: str, timeout_s: float) -> None:
        retry = tenacity.Retrying(
            stop=tenacity.stop_after_delay(timeout_s),
            wait=tenacity.wait_fixed(READY_POLL_S),
            retry=tenacity.retry_if_result(lambda waiting: bool(waiting) and not self._failed),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else "",
        )
        waiting = retry(
            lambda: [n for n in self.names(kind) if self._members[n].state is not _State.UP]
        )
        if waiting:
            raise ClusterFailed(f"{', '.join(waiting)} did not come up{self._log_tails()}")

    def _stop_all(self, kind: str) -> None:
        stops = {name: self._call(self._drain, name) for name in self.names(kind)}
        for name, stop in stops.items():
            try:
                stop.result(DRAIN_TIMEOUT_S)
            except TimeoutError:
                self._emit("killed", member=name, message=f"no drain in {DRAIN_TIMEOUT_S:g} s")
                self._call(lambda member: self._kill(member, False), name)
                stop.result(DRAIN_TIMEOUT_S)

    # -- readiness ----------------------------------------------------------------------------

    def _missing(self) -> str:
        """What is not ready yet, in words; empty: all is."""
        if self._failed is not None:
            raise self._failed
        expected = [m for m in self._members.values() if not m.held]
        waiting = [m.name for m in expected if m.state is not _State.UP]
        if waiting:
            return f"{', '.join(waiting)} not serving"
        for nameserver in (m for m in expected if m.kind == "nameserver"):
            missing = self._unregistered(nameserver, expected)
            if missing:
                return missing
        return ""

    def _unregistered(self, nameserver: _Member, expected: list[_Member]) -> str:
        with grpc.insecure_channel(nameserver.address) as channel:
            stub = nameserver_pb2_grpc.NameserverStub(channel)
            try:
                cluster = stub.GetCluster(nameserver_pb2.GetClusterRequest(), timeout=RPC_TIMEOUT_S)
            except grpc.RpcError as error:
                return f"{nameserver.name}: {error.details()}"
        present = {(i.name, i.address) for i in (*cluster.brokers, *cluster.timers)}
        missing = [
            member.name
            for member in expected
            if member.kind != "nameserver" and (member.name, member.address) not in present
        ]
        return f"{', '.join(missing)} not registered at {nameserver.name}" if missing else ""

    def _log_tails(self) -> str:
        """The ends of the logs of what does not run, for an error message."""
        tails = []
        for member in self._members.values():
            if member.state is not _State.UP and self.log_file(member.name).exists():
                tail = self.log_file(member.name).read_bytes()[-LOG_TAIL_BYTES:]
                tails.append(f"\n--- {member.name}\n{tail.decode(errors='replace')}")
        return "".join(tails)

    def _emit(self, event: str, **details: Any) -> None:
        self._on_event(ClusterEvent(event, details))


class _Ended(Exception):
    """The supervisor thread's work is done."""


def _require_services() -> None:
    for module in MODULES.values():
        if importlib.util.find_spec(module) is None:
            raise ClusterFailed(
                f"the module {module!r} is missing: an embedded cluster needs the distribution "
                "duemq-server"
            )


def _listening_address(line: bytes) -> str:
    try:
        message = json.loads(line)
    except ValueError:
        return ""
    if isinstance(message, dict) and message.get("event") == "listening":
        return str(message["address"])
    return ""


def _reason(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _pid(member: _Member) -> int:
    return member.process.pid if member.process is not None else 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
