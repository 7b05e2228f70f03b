"""`duemq up`: a whole cluster on this machine."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType

import click

from duemq.protocol import checks
from duemq.settings import Tls, default_tls
from duemq.transport.tls import read
from duemq_cli.exits import Exit
from duemq_cli.interrupts import WAIT_S_MAX
from duemq_cli.output import Output, as_json
from duemq_cli.session import Session, pass_session, session_options
from duemq_server.local_cluster import (
    CalledOff,
    ClusterEvent,
    ClusterFailed,
    EmbeddedCluster,
)
from duemq_server.local_cluster.cluster import LOOPBACK
from duemq_server.local_cluster.plan import BROKERS_DEFAULT, BROKERS_MAX
from duemq_server.replication.settings import REPLICAS_MAX
from duemq_server.serving.permissions.permissions_file import PermissionsFile

PORT_DEFAULT = 9876


@click.command()
@click.option(
    "--data",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Where all data and logs lie.  Made when missing; a restart on it keeps everything.  Of a"
    " member's log 80 MiB are kept, in five files.",
)
@click.option(
    "--brokers",
    type=click.IntRange(1, BROKERS_MAX),
    help=f"How many brokers.  [default: those that DIR has, {BROKERS_DEFAULT} for a new one]",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, REPLICAS_MAX),
    help="Of each broker and timer service, a process and a directory each.  [default: those that"
    " DIR has, 1 for a new one]",
)
@click.option(
    "--min-insync",
    type=click.IntRange(0, REPLICAS_MAX),
    default=0,
    help="Replicas that must have what is acknowledged on their disks; while fewer are in sync,"
    " nothing is accepted.  [default: more than half of them]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT_DEFAULT,
    show_default=True,
    help="Of the nameserver; 0: the one of last time, or any free one.",
)
@click.option(
    "--tracing",
    type=click.Choice(["off", "duemq", "otlp"]),
    default="off",
    show_default=True,
    help="Where the services' spans go; duemq: to the %TRACE% topic, for `duemq trace report`.",
)
@click.option(
    "--listen",
    "host",
    metavar="HOST",
    default=LOOPBACK,
    show_default=True,
    help="The address of this machine that all listen on; 0.0.0.0 or ::, on every one.",
)
@click.option(
    "--advertise",
    metavar="HOST",
    help="By which others reach this machine, and it itself.  [default: that of --listen]",
)
@click.option("--metrics", is_flag=True, help="Serve Prometheus metrics; DIR/metrics.json: where.")
@click.option(
    "--tls-verify-clients", is_flag=True, help="Serve only who shows a certificate of --tls-ca."
)
@click.option(
    "--permissions",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="TOML file: who may do what, by names in certificates.  With --tls-verify-clients.",
)
@session_options
@pass_session
def up(
    session: Session,
    data: str,
    brokers: int | None,
    replicas: int | None,
    min_insync: int,
    port: int,
    tracing: str,
    host: str,
    advertise: str | None,
    metrics: bool,
    tls_verify_clients: bool,
    permissions: str | None,
) -> Exit:
    """Run a whole cluster on this machine: nameserver, brokers, timer service.

    Prints a line when it is usable, with --json {"event":"ready","nameserver":"127.0.0.1:PORT",
    "processes":{NAME:PID,…}}, with --metrics {NAME:HOST:PORT,…} as metrics, too.  A process that
    dies is started again and said so.  Ctrl-C or SIGTERM drains and stops everything; the data
    stay.  Who can reach the address of --listen can send, read and delete, unless --permissions is
    given.  With `duemq --tls-ca FILE --tls-cert FILE --tls-key FILE up` all connections are TLS;
    the certificate is for the address, or --advertise, and for servers and clients.

    With --replicas 3 or more, a broker or timer service goes on when one of its processes dies with
    its disk: what was acknowledged is on the disks of more than half of them.  Of two that is both:
    while the one that follows is away nothing is accepted, while the one that leads is nothing is
    read, either, unless --min-insync 1 says so.  Processes are named broker-0/a, timer-0/b and so
    on, with their data in DIR/broker-0/a; the cluster is usable once all are in sync.  `duemq
    cluster show` says who leads.

    \b
    Examples:
      duemq up --data ./data
      duemq up --data ./data --brokers 3 --port 0 --json
      duemq up --data ./data --brokers 1 --replicas 3
      duemq up --data ./data --listen 0.0.0.0 --advertise build-7.lan --metrics
    """
    if session.nameserver_written:
        session.output.note(
            "`up` starts a nameserver of its own, see --port: --nameserver is not it"
        )
    # Not an Event: a signal may come in its `wait` while that holds the lock that `set` takes.
    stop: SimpleQueue[None] = SimpleQueue()

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop.put(None)

    checks.filled("data", data)  # else it would be the current folder
    permitted = _permitted(permissions, verify_clients=tls_verify_clients)
    flags = {kind: ["--tracing", tracing, *permitted] for kind in ("broker", "timer")}
    flags["nameserver"] = permitted
    before = {n: signal.signal(n, request_stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        cluster = EmbeddedCluster(
            data,
            brokers=brokers,
            replicas=replicas,
            min_insync=min_insync,
            port=port,
            host=host,
            advertise=advertise,
            metrics=metrics,
            flags=flags,
            tls=_tls(verify_clients=tls_verify_clients),
            verify_clients=tls_verify_clients,
            on_event=_sayer(session.output),
        )
        cluster.start(called_off=lambda: not stop.empty())
        try:
            _wait(stop)
        finally:
            cluster.stop()
        return Exit.FAILED if cluster.failure else Exit.OK
    except CalledOff:
        return Exit.OK
    except ClusterFailed as error:
        session.output.error(error)
        return Exit.FAILED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tls(*, verify_clients: bool) -> Tls | None:
    """Of the members.  A client's authorities alone are not meant for them.

    What is in the files is looked at here: none of them would start.
    """
    tls = default_tls()
    if tls is not None and tls.cert:
        read(tls, "tls")
        return tls
    if verify_clients:
        raise checks.wrong("tls_cert", "", "given with --tls-verify-clients")
    return None


def _permitted(path: str | None, *, verify_clients: bool) -> list[str]:
    """Flags of all members.  What is in the file is looked at here: none of them would start."""
    if path is None:
        return []
    if not verify_clients:
        raise checks.wrong("tls_verify_clients", "false", "given with --permissions")
    PermissionsFile(path)
    return ["--permissions", path]


def _wait(stop: SimpleQueue[None]) -> None:
    while True:
        with suppress(Empty):
            return stop.get(timeout=WAIT_S_MAX)


def _sayer(output: Output) -> Callable[[ClusterEvent], None]:
    def say(event: ClusterEvent) -> None:
        told = {"event": event.event, **event.details}
        with suppress(OSError):  # nobody reads: that keeps nothing from being stopped
            click.echo(as_json(told) if output.as_json else _sentence(event))

    return say


def _sentence(event: ClusterEvent) -> str:
    details = event.details
    member = details.get("member", "")
    if event.event == "started":
        pages = f", metrics on {details['metrics']}" if "metrics" in details else ""
        return f"{member} serves on {details['address']}{pages}, process {details['pid']}"
    if event.event == "reopened":
        return f"{member} has opened its data anew and serves on {details['address']}"
    if event.event == "died":
        return f"{member} died ({details['reason']}, process {details['pid']})"
    if event.event == "restarted":
        return f"{member} is started again, process {details['pid']}"
    if event.event == "moved":
        return f"{member}: port {details['from_port']} is taken, takes another"
    if event.event == "ready":
        of = f", {details['replicas']} replicas each" if "replicas" in details else ""
        return f"ready{of}: --nameserver {details['nameserver']}  (Ctrl-C stops)"
    if event.event == "stopping":
        return "stopping …"
    if event.event == "stopped":
        return "stopped"
    return f"{member}: {details.get('message', event.event)}"
