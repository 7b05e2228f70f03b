"""Stands in for a replica: who gets the group's lock leads, and registers it.

A replica is in sync while its process holds its own lock.  The folder `<data-dir>.orders` tells it
to misbehave: a file `exec` has it replace the image of its process, once; a file `lag` keeps it
from being in sync; a file `removed` makes it no member.  `<data-dir>/disk_id` is made where it is
missing.
"""

import argparse
import fcntl
import json
import os
import secrets
import signal
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc

from duemq.v1 import nameserver_pb2 as pb
from duemq.v1 import stubs
from duemq_server.replication.running.v1 import replication_pb2

PERIOD_S = 0.02


def locked(path: Path) -> int | None:
    """A descriptor that holds the lock; None: somebody else does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


class Replica:
    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.leases = Path(settings.lease_store.removeprefix("file:"))
        self.orders = Path(f"{settings.data_dir}.orders")
        self.leads: int | None = None
        self.stop = threading.Event()
        self.leases.mkdir(exist_ok=True)
        Path(settings.data_dir).mkdir(parents=True, exist_ok=True)
        disk_id = Path(settings.data_dir) / "disk_id"
        if not disk_id.exists():
            disk_id.write_text(secrets.token_hex(16))

    def lock_of(self, name: str) -> Path:
        return self.leases / f"{self.settings.name}.{name}"

    def serve(self) -> None:
        server = grpc.server(futures.ThreadPoolExecutor(1))
        status = grpc.unary_unary_rpc_method_handler(
            self.status,
            replication_pb2.GetStatusRequest.FromString,
            replication_pb2.ReplicaStatus.SerializeToString,
        )
        service = "duemq.replication.v1.Replication"
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {"GetStatus": status})]
        )
        server.add_insecure_port(self.settings.listen)
        server.start()
        listening = {"event": "listening", "address": self.settings.listen}
        print(json.dumps(listening), flush=True)
        mine = locked(self.lock_of(self.settings.replica))
        assert mine is not None
        while not self.stop.wait(PERIOD_S):
            self.step()
        server.stop(None)

    def step(self) -> None:
        if (self.orders / "exec").exists():
            (self.orders / "exec").unlink()
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        if self.leads is None:
            self.leads = locked(self.lock_of("leader"))
        if self.leads is not None:
            self.register()

    def status(self, request: object, context: object) -> replication_pb2.ReplicaStatus:
        role = "leader" if self.leads is not None else "follower"
        names = self.settings.replicas.split(",")
        members = [name for name in names if not (self.orders_of(name) / "removed").exists()]
        record = json.dumps({"members": members})
        return replication_pb2.ReplicaStatus(group=self.settings.name, role=role, record=record)

    def orders_of(self, name: str) -> Path:
        return Path(self.settings.data_dir).parent / f"{name}.orders"

    def report(self, name: str) -> pb.ReplicaReport:
        me = name == self.settings.replica
        other = None if me else locked(self.lock_of(name))
        if other is not None:
            os.close(other)
        there = other is None and not (self.orders_of(name) / "lag").exists()
        return pb.ReplicaReport(name=name, role=pb.LEADER if me else pb.FOLLOWER, in_sync=there)

    def register(self) -> None:
        request = pb.RegisterRequest(expiry_ms=60_000)
        request.version.epoch = time.time_ns()
        kind = self.settings.name.partition("-")[0]
        report = pb.BrokerReport() if kind == "broker" else pb.TimerReport(shards=1)
        report.name, report.address = self.settings.name, self.settings.advertise
        report.replicas.extend(map(self.report, self.settings.replicas.split(",")))
        getattr(request, kind).CopyFrom(report)
        for nameserver in self.settings.nameservers.split(","):
            with grpc.insecure_channel(nameserver) as channel:
                stubs.NameserverStub(channel).Register(request, timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser()
    flags = ("listen", "advertise", "name", "nameservers", "data-dir")
    for flag in (*flags, "replica", "replicas", "lease-store"):
        parser.add_argument(f"--{flag}", required=True)
    settings, _ = parser.parse_known_args()
    replica = Replica(settings)
    signal.signal(signal.SIGTERM, lambda *_: replica.stop.set())
    replica.serve()


main()
