"""Stands in for a broker or timer service: listens, registers once, obeys SIGTERM.

The folder `<data-dir>.orders` tells it to misbehave: a file `die` ends it at its start, a file
`deaf` makes it ignore SIGTERM.  It appends `start` and `stop` lines to `<data-dir>.life`.
"""

import argparse
import json
import signal
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc

from duemq.v1 import nameserver_pb2, stubs


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("listen", "name", "nameservers", "data-dir"):
        parser.add_argument(f"--{flag}")
    settings, _ = parser.parse_known_args()
    orders = Path(f"{settings.data_dir}.orders")
    life = Path(f"{settings.data_dir}.life")
    if (orders / "die").exists():
        sys.exit("told to die")
    stop = threading.Event()
    handler = (lambda *_: None) if (orders / "deaf").exists() else (lambda *_: stop.set())
    signal.signal(signal.SIGTERM, handler)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port(settings.listen)
    server.start()
    address = f"127.0.0.1:{port}"
    register(settings.nameservers, settings.name, address)
    with life.open("a") as file:
        file.write(f"start {port}\n")
    print(json.dumps({"event": "listening", "address": address}), flush=True)
    stop.wait()
    with life.open("a") as file:
        file.write("stop\n")
    server.stop(None)


def register(nameservers: str, name: str, address: str) -> None:
    request = nameserver_pb2.RegisterRequest(expiry_ms=60_000)
    if name.startswith("broker"):
        request.broker.name, request.broker.address = name, address
    else:
        request.timer.name, request.timer.address, request.timer.shards = name, address, 1
    for nameserver in nameservers.split(","):
        with grpc.insecure_channel(nameserver) as channel:
            stubs.NameserverStub(channel).Register(request, timeout=60)


main()
