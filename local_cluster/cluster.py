"""An embedded cluster: its members, their command lines, and when it is ready.

Every member is a child process of the supervisor
(supervisor.py).  They are stopped against the stream of messages: timer services first (they send
to brokers), then brokers, then nameservers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import tenacity

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.settings import Tls
from duemq_server.local_cluster import plan, readiness, safe_path
from duemq_server.local_cluster.layout import Layout
from duemq_server.local_cluster.supervisor import (
    CalledOff,
    ChildPlace,
    ChildState,
    ClusterEvent,
    ClusterFailed,
    Supervisor,
    metrics_name,
)
from duemq_server.serving.settings import WILDCARDS, ProcessSettings, joined

LOOPBACK = "127.0.0.1"
# A nameserver spends 1 to 2 ms of CPU on a heartbeat: three members cost it 0.7 % of a core.
HEARTBEAT_PERIOD_S = 0.75
# Ten processes that start on a busy machine of two processors take half a minute.
READY_TIMEOUT_S = 90.0
READY_POLL_S = 0.05
# Of a member's log, shown when it is given up.
LOG_TAIL_BYTES = 2_000

STOP_ORDER = ("timer", "broker", "nameserver")


class EmbeddedCluster:
    """Runs a cluster on this machine; a context manager that starts and stops it.

    Raises from the constructor and `start`: InvalidArgument for settings that do not fit (the
    folder's lock is taken, fewer brokers than its data have, a port is taken), ClusterFailed when
    it does not come up.

    directory: where the data lie; made when missing.  A restart on it keeps the data, and the ports
        that nobody took meanwhile (event "moved").
    brokers: how many; None: as many as the folder knows, 2 for a new one.
    replicas: of each broker and timer service; None: as many as the folder knows, one for a new
        one.
    min_insync: of them, how many must have what is acknowledged; 0: more than half.
    port: of the first nameserver; 0: the one of last time, else any free one.
    host: the address that members listen on; 0.0.0.0 or ::, on every one.
    advertise: the host by which others reach this machine; needed where `host` names none.
    metrics: members serve Prometheus pages, on ports that stay; DIR/metrics.json lists them.
    flags: more command line flags for members, by kind ("nameserver", "broker", "timer").
    tls: members show this certificate, for `advertise` or else `host`, and reach one another with
        it.
    verify_clients: who has no certificate of `tls.ca` is not served.
    on_event: called from the supervisor thread with each ClusterEvent; must not block.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        brokers: int | None = None,
        replicas: int | None = None,
        min_insync: int = 0,
        nameservers: int = 1,
        port: int = 0,
        host: str = LOOPBACK,
        advertise: str | None = None,
        metrics: bool = False,
        heartbeat_period_s: float = HEARTBEAT_PERIOD_S,
        flags: Mapping[str, Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
        tls: Tls | None = None,
        verify_clients: bool = False,
        on_event: Callable[[ClusterEvent], None] | None = None,
    ) -> None:
        plan.require_services()
        self._layout = Layout(Path(directory).resolve())
        self._brokers = brokers
        self._replicas = replicas
        self._min_insync = min_insync
        self._nameservers = nameservers
        self._port = port
        self._host = host.strip("[]")
        self._advertise = _advertised(self._host, advertise)
        self._metrics = metrics
        self._heartbeat_period_s = heartbeat_period_s
        self._flags = dict(flags or {})
        self._tls = tls
        self._tls_flags = plan.tls_flags(tls, verify_clients) if tls is not None else []
        # Members are told all by flags: settings meant for another process must not reach them.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DUEMQ_")}
        self._supervisor = Supervisor(
            self._layout,
            self._command,
            {**safe_path.environment(inherited), **(environment or {})},
            on_event or (lambda event: None),
        )
        self._members = self._supervisor.members
        self._started = False
        self._called_off = _never

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

    def start(
        self, timeout_s: float = READY_TIMEOUT_S, *, called_off: Callable[[], bool] | None = None
    ) -> None:
        """Starts all members and returns when the cluster is usable.

        `called_off` is asked again and again meanwhile: True ends it with CalledOff, and all that
        runs.
        """
        self._called_off = called_off or _never
        self._layout.open()
        try:
            self._plan()
            self._supervisor.start()
            self._started = True
            for kind in reversed(STOP_ORDER):
                self._start_all(kind, timeout_s)
            self.wait_ready(timeout_s)
            self._layout.write_targets(self.metrics)
        except BaseException:
            self.stop()
            raise
        finally:
            self._called_off = _never
        ready: dict[str, object] = {"nameserver": self.nameserver, "processes": self.processes}
        if self._layout.replicas > 1:
            ready["replicas"] = self._layout.replicas
        if self._metrics:
            ready["metrics"] = self.metrics
        self._supervisor.emit("ready", **ready)

    def stop(self) -> None:
        """Drains and stops all members.  Idempotent."""
        if self._started:
            self._supervisor.emit("stopping")
            self._supervisor.stopping.set()
            for kind in STOP_ORDER:
                self._stop_kind(kind)
            self._supervisor.end()
            self._started = False
            self._supervisor.emit("stopped")
        self._layout.close()

    def _stop_kind(self, kind: str) -> None:
        """Who leads replicas goes last: it would wait for a successor that stops, too."""
        groups = {self._members[name].group for name in self.names(kind)}
        replicated = [group for group in groups if len(self.replicas(group)) > 1]
        leaders = {self.leader(group) for group in replicated}
        self._supervisor.stop_members(name for name in self.names(kind) if name not in leaders)
        self._supervisor.stop_members(name for name in self.names(kind) if name in leaders)

    # -- what callers see ---------------------------------------------------------------------

    @property
    def nameserver(self) -> str:
        """The nameservers' addresses as clients take them: host:port, comma-separated."""
        return ",".join(self._advertised(self._members[n]) for n in self.names("nameserver"))

    @property
    def metrics(self) -> dict[str, str]:
        """Where each member's Prometheus page is, HOST:PORT, by name; empty without metrics."""
        return {
            member.name: joined(self._advertise, member.metrics.rsplit(":", 1)[1])
            for member in self._members.values()
            if member.metrics
        }

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of the members that run, by name."""
        return {
            member.name: process.pid
            for member in self._members.values()
            if (process := member.process) is not None  # the supervisor's thread may end it now
        }

    @property
    def failure(self) -> ClusterFailed | None:
        """Why the cluster is no longer whole, once a member was given up."""
        return self._supervisor.failed

    def names(self, kind: str) -> list[str]:
        """Names of the members of a kind: "nameserver", "broker" or "timer"."""
        return [member.name for member in self._members.values() if member.kind == kind]

    def replicas(self, group: str) -> list[str]:
        """Names of the members that are one broker, or timer service, for clients."""
        return [member.name for member in self._members.values() if member.group == group]

    def leader(self, group: str) -> str:
        """The member that leads a group, as a nameserver and itself say; empty: none does now."""
        members = [self._members[name] for name in self.replicas(group)]
        if not members[0].replica:
            return members[0].name
        nameservers = [self._members[name] for name in self.names("nameserver")]
        found = (
            readiness.leader_of(nameserver, group, members, self._advertised, self._tls)
            for nameserver in nameservers
            if nameserver.state is ChildState.UP
        )
        return next(filter(None, found), "")

    def address(self, name: str) -> str:
        """Where a member listens, for this machine; it stays over restarts."""
        return self._members[name].address

    def _advertised(self, member: ChildPlace) -> str:
        """Where others reach a member."""
        return joined(self._advertise, member.address.rsplit(":", 1)[1])

    def log_file(self, name: str) -> Path:
        """A member's log."""
        return self._layout.log_file(name)

    def data_dir(self, name: str) -> Path:
        """A member's data."""
        return self._layout.data_dir(name)

    def kill(self, name: str, *, restart: bool = True) -> None:
        """kill -9.  The supervisor starts the member again unless `restart` is False."""
        self._supervisor.kill(name, restart)

    def stop_member(self, name: str) -> int:
        """Drains one member and leaves it stopped; returns its exit code."""
        return self._supervisor.stop_member(name)

    def start_member(self, name: str) -> None:
        """Starts a member that was stopped or killed without restart."""
        self._supervisor.start_member(name)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Returns when every member that should run serves and is registered everywhere.

        With replicas: when each group has a leader, and those that should run are in sync.
        """
        missing = self._waited(self._missing, timeout_s, self._supervisor.stopping.is_set)
        if missing:
            raise ClusterFailed(f"not ready after {timeout_s:g} s: {missing}{self._log_tails()}")

    # -- the plan -----------------------------------------------------------------------------

    def _plan(self) -> None:
        for member in plan.members_of(
            self._layout,
            nameservers=self._nameservers,
            brokers=self._brokers,
            replicas=self._replicas,
            min_insync=self._min_insync,
        ):
            member.address = joined(self._host, self._choose_port(member.name))
            if self._metrics:
                port = self._choose_port(metrics_name(member.name))
                member.metrics = joined(self._host, port)
            self._members[member.name] = member

    def _choose_port(self, name: str) -> int:
        asked = self._port if name == "nameserver-0" else 0
        known = asked or self._layout.port(name)
        try:
            return self._layout.hold(known, self._host)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise InvalidArgument(
                    f"{self._host} cannot be listened on: {error.strerror}",
                    field="listen",
                    value=self._host,
                    limit="an address of this machine",
                ) from error
            if asked:
                raise InvalidArgument(
                    f"port {asked} is taken; choose another with --port, 0 for any",
                    field="port",
                    value=str(asked),
                ) from error
        self._supervisor.emit("moved", member=name, from_port=known)
        return self._layout.hold(0, self._host)

    def _command(self, member: ChildPlace) -> list[str]:
        group = [self._members[name] for name in self.replicas(member.group)]
        command = plan.command_of(member, group, self._layout)
        # As chosen, or as it was: a restart keeps it.
        command += ["--listen", joined(self._host, member.address.rsplit(":", 1)[1])]
        command += ["--advertise", self._advertised(member)]
        if member.metrics:
            command += ["--metrics-listen", member.metrics]
        if member.kind == "nameserver":
            command += ["--ready-after", str(self._heartbeat_period_s)]
        else:
            command += ["--nameservers", self.nameserver]
            command += ["--heartbeat-period", str(self._heartbeat_period_s)]
            command += ["--min-insync", str(self._min_insync)] if self._min_insync else []
        return [*command, *self._tls_flags, *self._flags.get(member.kind, ())]

    # -- readiness ----------------------------------------------------------------------------

    def _start_all(self, kind: str, timeout_s: float) -> None:
        """Starts the members of a kind; waits for those whose address others are told."""
        for name in self.names(kind):
            self.start_member(name)
        if kind == "nameserver":
            waiting = self._waited(
                lambda: self._not_up(kind), timeout_s, lambda: bool(self.failure)
            )
            if waiting:
                raise ClusterFailed(f"{waiting} did not come up{self._log_tails()}")

    def _waited(
        self, lacking: Callable[[], str], timeout_s: float, ends: Callable[[], bool]
    ) -> str:
        """What is lacking in the end, in words; it is asked for until nothing is."""
        retry = tenacity.Retrying(
            stop=tenacity.stop_after_delay(timeout_s),
            wait=tenacity.wait_fixed(READY_POLL_S),
            retry=tenacity.retry_if_result(lambda found: bool(found) and not ends()),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else "",
        )
        return retry(lacking)

    def _not_up(self, kind: str) -> str:
        self._check_wanted()
        return ", ".join(n for n in self.names(kind) if self._members[n].state is not ChildState.UP)

    def _check_wanted(self) -> None:
        if self._called_off():
            raise CalledOff

    def _missing(self) -> str:
        """What is not ready yet, in words; empty: all is."""
        self._check_wanted()
        if self.failure is not None:
            raise self.failure
        expected = [m for m in self._members.values() if not m.held]
        waiting = [m.name for m in expected if m.state is not ChildState.UP]
        if waiting:
            return f"{', '.join(waiting)} not serving"
        for nameserver in (m for m in expected if m.kind == "nameserver"):
            missing = readiness.unregistered(nameserver, expected, self._advertised, self._tls)
            if missing:
                return missing
        return ""

    def _log_tails(self) -> str:
        """The ends of the logs of what does not run, for an error message."""
        tails = []
        for member in self._members.values():
            if member.state is not ChildState.UP and self.log_file(member.name).exists():
                tail = self.log_file(member.name).read_bytes()[-LOG_TAIL_BYTES:]
                tails.append(f"\n--- {member.name}\n{tail.decode(errors='replace')}")
        return "".join(tails)


def _never() -> bool:
    return False


def _advertised(host: str, advertise: str | None) -> str:
    """The host for others.  Raises InvalidArgument where none can be known."""
    if advertise:
        name = advertise.strip("[]")
        try:
            ProcessSettings(advertise=joined(name, 1))  # as members would refuse it
        except InvalidArgument as error:
            limit = "a host name or address of this machine, without a port"
            raise checks.wrong("advertise", advertise, limit) from error
        return name
    if host in WILDCARDS:
        raise InvalidArgument(
            f"to listen on {host} says not how others reach this machine: say so by --advertise",
            field="advertise",
            limit="a host name or address of this machine",
        )
    return host
