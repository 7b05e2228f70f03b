"""Who is in an embedded cluster: names, groups of replicas, command lines.

With one replica a member is called `broker-0`.  With more, `broker-0` names a group, which clients
know by that name, and its members are `broker-0/a`, `broker-0/b` and so on.
"""

from __future__ import annotations

import importlib.util
import string
import sys
from collections.abc import Sequence

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.settings import Tls
from duemq_server.local_cluster.layout import Layout
from duemq_server.local_cluster.supervisor import ChildPlace, ClusterFailed
from duemq_server.replication.settings import REPLICAS_MAX

BROKERS_DEFAULT = 2
BROKERS_MAX = 16

# A member's name begins with its kind; the module serves it.
MODULES = {
    "nameserver": "duemq_server.nameserver",
    "broker": "duemq_server.broker",
    "timer": "duemq_server.timer_service",
}
REPLICATED = ("broker", "timer")
"""The kinds that have replicas where the cluster has."""


def require_services() -> None:
    """Raises ClusterFailed if what members run is not installed."""
    for module in MODULES.values():
        if importlib.util.find_spec(module) is None:
            raise ClusterFailed(
                f"the module {module!r} is missing: an embedded cluster needs the distribution "
                "duemq-server"
            )


def members_of(
    layout: Layout,
    *,
    nameservers: int,
    brokers: int | None,
    replicas: int | None,
    min_insync: int = 0,
) -> list[ChildPlace]:
    """The members, as the folder knows them where nothing is said; without addresses.

    Raises InvalidArgument for what does not fit the folder's data.
    """
    groups = layout.groups("broker")
    known = int(groups[-1].rsplit("-", 1)[1]) + 1 if groups else 0  # they are numbered from 0
    brokers = brokers or known or BROKERS_DEFAULT
    checks.between("brokers", brokers, 1, BROKERS_MAX)
    if brokers < known:
        raise InvalidArgument(
            f"{layout.directory} holds data of {known} brokers: with {brokers} some of "
            "its messages would be out of reach",
            field="brokers",
            value=str(brokers),
            limit=str(known),
        )
    names = _replica_names(layout, known, replicas)
    if min_insync > layout.replicas:
        raise checks.wrong("min_insync", min_insync, f"at most the replicas, {layout.replicas}")
    found = []
    for kind, count in (("nameserver", nameservers), ("broker", brokers), ("timer", 1)):
        for number in range(count):
            found += _group(f"{kind}-{number}", kind, names if kind in REPLICATED else ())
    return found


def _replica_names(layout: Layout, known: int, replicas: int | None) -> Sequence[str]:
    """Of each group; empty: no replicas."""
    count = replicas or layout.replicas
    checks.between("replicas", count, 1, REPLICAS_MAX)
    if known and count != layout.replicas:
        raise InvalidArgument(
            f"{layout.directory} holds brokers and timer services of {layout.replicas} replicas"
            " each; how many is decided when they are made",
            field="replicas",
            value=str(count),
            limit=str(layout.replicas),
        )
    layout.replicas = count
    return string.ascii_lowercase[:count] if count > 1 else ""


def _group(name: str, kind: str, replicas: Sequence[str]) -> list[ChildPlace]:
    if not replicas:
        return [ChildPlace(name, kind, group=name)]
    return [ChildPlace(f"{name}/{each}", kind, group=name, replica=each) for each in replicas]


def command_of(member: ChildPlace, group: Sequence[ChildPlace], layout: Layout) -> list[str]:
    """What starts a member, without its addresses and without what others are told of it."""
    command = [sys.executable, "-m", "duemq_server.local_cluster.child"]
    command += ["--log", str(layout.log_file(member.name)), MODULES[member.kind]]
    if member.kind == "nameserver":
        return command
    command += ["--name", member.group, "--data-dir", str(layout.data_dir(member.name))]
    if member.replica:
        command += ["--replica", member.replica]
        command += ["--replicas", ",".join(each.replica for each in group)]
        command += ["--lease-store", f"file:{layout.leases}"]
    return command


def tls_flags(tls: Tls, verify_clients: bool) -> list[str]:
    """What every member is told of certificates."""
    flags = ["--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca]
    return [*flags, "--tls-verify-clients"] if verify_clients else flags
