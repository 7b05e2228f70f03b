"""Clients inside and outside of one cluster, each given only its nameserver port.

Inside addresses have a name that leads somewhere only for who has the inside's proxy; the proxy of
the process outside knows all that it asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from duemq import Admin, Producer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.message import Message
from duemq.protocol import balance
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from duemq_server.local_cluster.layout import bind_port
from tests.cluster.connect_proxy import LOOPBACK, ConnectProxy
from tests.cluster.harness import WAIT_S, leader_of, topic_name, until

INSIDE = "inside.invalid"
BROKERS = ["broker-0", "broker-1"]
# The broker that dies coordinates it.
GROUP = next(f"g{n}" for n in range(99) if balance.coordinator(f"g{n}", BROKERS) == "broker-0")
EARLIEST = ConsumerSettings(start_from="earliest")


class Outside:
    """The process outside, as the test talks with it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.received: set[str] = set()
        self._process = process
        self._answers: list[Any] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "received" in said:
                self.received.add(said["received"])
            else:
                self._answers.append(said["answer"])

    def answer(self) -> Any:
        until(lambda: bool(self._answers) or self._process.poll() is not None)
        return self._answers.pop(0)

    def ask(self, **asked: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(WAIT_S)

    def forget(self) -> None:
        """Its process is gone."""
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def outside_client(*arguments: str, proxy: ConnectProxy) -> Iterator[Outside]:
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).parent / "outside_client.py"), *arguments],
        env={**os.environ, "grpc_proxy": proxy.url},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    client = Outside(process)
    try:
        assert client.answer() == "ready"
        yield client
        assert client.end() == 0
    finally:
        process.kill()
        process.wait()
        client.forget()


def with_external_ports(nameserver: str) -> dict[str, list[str]]:
    any_port = ["--external-listen", f"{LOOPBACK}:0"]
    return {
        "nameserver": ["--external-listen", nameserver],
        "broker": any_port,
        "timer": any_port,
    }


def test_clients_of_both_sides_share_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topic_name()
    here: set[str] = set()

    def receive(message: Message) -> None:
        here.add(message.body.decode())

    with ConnectProxy(INSIDE) as within, ConnectProxy(LOOPBACK) as without, bind_port(0) as held:
        external = f"{LOOPBACK}:{held.getsockname()[1]}"
        monkeypatch.setenv("grpc_proxy", within.url)
        for name in ("no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        flags = with_external_ports(external)
        with (
            EmbeddedCluster(tmp_path, advertise=INSIDE, flags=flags) as cluster,
            Admin(cluster.nameserver) as admin,
            outside_client(external, topic, GROUP, proxy=without) as outside,
        ):
            assert outside.ask(brokers=True) == BROKERS
            assert outside.ask(topic=True) == "made"
            until(lambda: topic in {each.name for each in admin.topics()})
            with (
                Producer(cluster.nameserver) as producer,
                PushConsumer(
                    GROUP, topic, receive, nameserver=cluster.nameserver, settings=EARLIEST
                ),
            ):
                sent: set[str] = set()

                def send(phase: str) -> None:
                    """From both sides, also with delays; each message comes to one of the two."""
                    for number in range(8):
                        delay = {"delay": 0.2} if number % 2 else {}
                        sent.update((f"{phase}-in-{number}", f"{phase}-out-{number}"))
                        producer.send(topic, f"{phase}-in-{number}".encode(), **delay)
                        outside.ask(body=f"{phase}-out-{number}", **delay)
                    until(lambda: here | outside.received == sent)

                rounds = iter(range(1_000))

                def both_have_some() -> bool:
                    send(f"begin-{next(rounds)}")
                    return bool(here) and bool(outside.received)

                until(both_have_some)
                moved, never = "moved", "never"
                for key in (moved, never):
                    outside.ask(body=key, timer_key=key, delay="1h")
                assert outside.ask(change=moved, delay="200ms") == "rescheduled"
                sent.add(moved)
                assert outside.ask(change=never, cancel=True) == "cancelled"
                until(lambda: here | outside.received == sent)
                before = {each.name: each.address for each in admin.cluster().brokers}
                cluster.kill("broker-0")
                cluster.wait_ready()
                send("again")
                assert outside.ask(brokers=True) == BROKERS
                assert {each.name: each.address for each in admin.cluster().brokers} == before
    assert without.asked == {LOOPBACK}
    assert within.asked == {INSIDE}


def test_the_external_address_is_that_of_the_replica_that_leads(tmp_path: Path) -> None:
    topic = topic_name()
    with bind_port(0) as held:
        external = f"{LOOPBACK}:{held.getsockname()[1]}"
        flags = with_external_ports(external)
        with (
            EmbeddedCluster(tmp_path, brokers=1, replicas=2, min_insync=1, flags=flags) as cluster,
            Producer(external) as producer,
            Admin(external) as admin,
        ):
            producer.send(topic, b"before")
            [before] = admin.cluster().brokers
            assert not any(each.address for each in before.replicas)
            cluster.kill(leader_of(cluster, "broker-0"), restart=False)

            def another_leads() -> bool:
                found = admin.cluster().brokers
                return [each.address for each in found if each.lost_ms is None] not in (
                    [],
                    [before.address],
                )

            until(another_leads)
            producer.send(topic, b"after")
            bodies = {message.body for message in read_topic(external, topic)}
    assert bodies == {b"before", b"after"}
