"""Settings of a process that is one replica of a group."""

import dataclasses
import re
from dataclasses import dataclass

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq_server.replication.protocol.record import MEMBERS_MAX
from duemq_server.replication.protocol.times import Times
from duemq_server.serving.settings import MemberSettings, check_address, setting

REPLICAS_MAX = MEMBERS_MAX
LEASE_STORES = ("file", "etcd", "kubernetes")
_REPLICA_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_LEASE_NAME = re.compile(rf"(?:{_REPLICA_NAME.pattern})(?:\.(?:{_REPLICA_NAME.pattern}))*")


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings(MemberSettings):
    """`name` is the group's: a broker's, or a timer shard's."""

    replica: str = setting("", "name of this replica in the group of `name`; empty: no replicas")
    replicas: tuple[str, ...] = setting((), "names of all replicas of the group, this one too")
    lease_store: str = setting(
        "none",
        "where the group's record lies, which says who leads: file:DIR (replicas on one machine),"
        " etcd:[https://]HOST:PORT,…, kubernetes[:NAMESPACE] (Leases), or none",
    )
    lease_store_ca: str = setting(
        "", "PEM file of the authorities that sign etcd's certificates; empty: the system's"
    )
    lease_store_cert: str = setting(
        "", "PEM file of the certificate that etcd is shown; needs _key"
    )
    lease_store_key: str = setting("", "PEM file of that certificate's private key")
    min_insync: int = setting(
        0,
        "replicas that must have what is acknowledged on their disks; fewer in sync: nothing is"
        " accepted; 0: more than half of them",
        minimum=0,
        maximum=REPLICAS_MAX,
    )
    lease_duration: float = setting(
        6.0, "silence after which another replica leads", unit="s", minimum=1, maximum=3600
    )
    lag_max: float = setting(
        3.0,
        "how long a replica may be behind before it is out of sync",
        unit="s",
        minimum=0.1,
        maximum=3600,
    )
    catch_up_rate: int = setting(
        64 << 20,
        "bytes a second that a replica gets that is not in sync; 0: no limit",
        unit="bytes",
        minimum=0,
        maximum=1 << 40,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.replica:
            for other in ("replicas", "lease_store"):
                if getattr(self, other) not in ((), "none"):
                    raise InvalidArgument(f"replica must be given with {other}", field="replica")
            if self.min_insync > 1:
                raise checks.wrong("min_insync", self.min_insync, "0 or 1 without replicas")
            return
        for name in (self.replica, *self.replicas):
            check_name("replicas", name)
        checks.count("replicas", len(set(self.replicas)), 1, REPLICAS_MAX)
        if self.replica not in self.replicas:
            raise checks.wrong("replica", self.replica, f"one of {', '.join(self.replicas)}")
        checks.at_most("min_insync", self.min_insync, len(set(self.replicas)))
        self._check_lease_store()
        address = self.advertise or self.listen
        if address.endswith(":0"):
            raise checks.wrong("listen", address, "a port that stays: others follow this replica")

    def _check_lease_store(self) -> None:
        kind, colon, place = self.lease_store.partition(":")
        if kind not in LEASE_STORES or (not place and (colon or kind != "kubernetes")):
            stores = "file:DIR, etcd:[https://]HOST:PORT,… or kubernetes[:NAMESPACE]"
            raise checks.wrong("lease_store", self.lease_store, stores)
        if kind == "etcd":
            for address in self.etcd_endpoints:
                check_address("lease_store", address)
        self._check_tls()
        if kind == "kubernetes":
            if place and not _REPLICA_NAME.fullmatch(place):
                raise checks.wrong("lease_store", self.lease_store, "a namespace's name")
            if not _LEASE_NAME.fullmatch(self.name):
                raise checks.wrong("name", self.name, "a Lease's name: a-z, 0-9, - and .")

    def _check_tls(self) -> None:
        files = self.lease_store_ca, self.lease_store_cert, self.lease_store_key
        if any(files) and not self.etcd_over_tls:
            raise checks.wrong(
                "lease_store", self.lease_store, "etcd:https://… with lease_store_ca, _cert or _key"
            )
        if bool(files[1]) != bool(files[2]):
            raise InvalidArgument(
                "lease_store_cert and lease_store_key must be given together",
                field="lease_store_key" if files[1] else "lease_store_cert",
            )
        if self.etcd_over_tls and self.lease_store.count("https://") != len(self.etcd_endpoints):
            raise checks.wrong(
                "lease_store", self.lease_store, "https:// for all endpoints or none"
            )

    @property
    def etcd_endpoints(self) -> list[str]:
        """HOST:PORT of each; none with another store."""
        kind, _, place = self.lease_store.partition(":")
        return (
            [each.removeprefix("https://") for each in place.split(",")] if kind == "etcd" else []
        )

    @property
    def etcd_over_tls(self) -> bool:
        """Whether etcd is asked over TLS."""
        return self.lease_store.startswith("etcd:") and "https://" in self.lease_store

    @property
    def own_name(self) -> str:
        """Of this process alone."""
        return f"{self.name}/{self.replica}" if self.replica else self.name

    @property
    def replicated(self) -> bool:
        """Whether this process is one of a group."""
        return bool(self.replica)

    @property
    def in_sync_min(self) -> int:
        """`min_insync`, or what it stands for."""
        return self.min_insync or len(set(self.replicas)) // 2 + 1

    def times(self) -> Times:
        """A leader serves 3/4 of a lease after it began to renew it, and renews it in 1/4.

        While nothing is written only heartbeats show who keeps up: three of them in `lag_max`.
        """
        lease_ms, lag_max_ms = int(self.lease_duration * 1000), int(self.lag_max * 1000)
        usual = Times()
        return dataclasses.replace(
            usual,
            lease_ms=lease_ms,
            serve_ms=lease_ms * 3 // 4,
            renew_ms=lease_ms // 4,
            heartbeat_ms=min(usual.heartbeat_ms, lag_max_ms // 3),
            lag_max_ms=lag_max_ms,
        )


def check_name(field: str, name: str) -> None:
    """Of a replica.  Raises InvalidArgument."""
    if not _REPLICA_NAME.fullmatch(name):
        raise checks.wrong(field, name, "a-z, 0-9 and -, at most 63 of them")
