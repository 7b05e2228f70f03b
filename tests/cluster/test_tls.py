"""A whole cluster that speaks TLS alone, and serves nobody without a certificate and rights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from duemq import Admin, ConsumerSettings, Producer, ProducerSettings, PushConsumer, Tls
from duemq.errors import TopicNotFound
from duemq.settings import ClientSettings
from duemq_server.local_cluster import EmbeddedCluster
from tests.certificates import authority, certificate, needs_openssl
from tests.cluster.harness import WAIT_S, leader_of, rows, topic_name, until

pytestmark = needs_openssl

BROKER = "broker-0"
ALLOWED = """
[[allow]]
names = ["server"]
service = true

[[allow]]
names = ["mine"]
send = ["*", "%TRACE%"]
receive = ["*"]
groups = ["*"]

[[allow]]
names = ["shop.example.org"]
send = ["shop-*"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    authority(folder)
    return folder


@pytest.fixture(scope="module")
def mine(folder: Path) -> Tls:
    return certificate(folder / "ca.pem", "mine", san="DNS:me")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[EmbeddedCluster]:
    permissions = folder / "permissions.toml"
    permissions.write_text(ALLOWED)
    permitted = ["--permissions", str(permissions)]
    with EmbeddedCluster(
        tmp_path_factory.mktemp("cluster"),
        brokers=1,
        replicas=3,
        tls=certificate(folder / "ca.pem", "server"),
        verify_clients=True,
        flags={
            "nameserver": permitted,
            "broker": ["--tracing", "duemq", *permitted],
            "timer": ["--tracing", "duemq", *permitted],
        },
    ) as embedded:
        yield embedded


def duemq(
    cluster: EmbeddedCluster, tls: Tls, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    files = ("--tls-ca", tls.ca, "--tls-cert", tls.cert, "--tls-key", tls.key)
    given = [part for part in files if part] if tls.cert else ["--tls-ca", tls.ca]
    command = [sys.executable, "-m", "duemq_cli", "--nameserver", cluster.nameserver]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DUEMQ_")} | variables
    return subprocess.run(
        [*command, *given, *arguments],
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
        env=environment,
    )


def test_what_is_sent_now_and_later_comes_also_after_a_leader_died(
    cluster: EmbeddedCluster, mine: Tls
) -> None:
    topic, received = topic_name(), list[bytes]()
    client = ClientSettings(tls=mine)
    settings = ProducerSettings(client=client, send_timeout_s=WAIT_S)
    consumer = PushConsumer(
        "billing",
        topic,
        lambda message: received.append(message.body),
        nameserver=cluster.nameserver,
        settings=ConsumerSettings(client=client, start_from="earliest"),
    )
    with Producer(cluster.nameserver, settings=settings) as producer:
        producer.send(topic, b"now")
        producer.send(topic, b"later", delay="3s", timer_key="k")
        cluster.kill(leader_of(cluster, BROKER))
        producer.send(topic, b"after")
        with consumer:
            until(lambda: len(received) >= 3)
    assert sorted(received) == [b"after", b"later", b"now"]
    with Admin(cluster.nameserver, settings=client) as admin:
        assert admin.describe_topic(topic).messages == 3
    cluster.wait_ready()


def test_the_command_line_names_the_files(cluster: EmbeddedCluster, mine: Tls) -> None:
    shown = rows(duemq(cluster, mine, "cluster", "show", "--json"))
    assert {row["kind"] for row in shown} >= {"broker", "timer"}
    replicas = rows(duemq(cluster, mine, "replica", "status", BROKER, "--json"))
    assert {row["name"] for row in replicas if row["role"]} == {"a", "b", "c"}


def test_who_has_no_certificate_is_told_so(cluster: EmbeddedCluster, mine: Tls) -> None:
    done = duemq(cluster, Tls(ca=mine.ca), "topic", "list")
    assert done.returncode == 3
    assert "speaks TLS, but no connection came of it" in done.stderr


@pytest.mark.long
def test_who_may_send_somewhere_does_nothing_else(cluster: EmbeddedCluster, folder: Path) -> None:
    shop = certificate(folder / "ca.pem", "anybody", san="DNS:shop.example.org")
    mine, other = f"shop-{topic_name()}", topic_name()
    keyed = ("--delay", "1h", "--timer-key", "k")
    assert rows(duemq(cluster, shop, "send", mine, "now", "--json"))
    assert rows(duemq(cluster, shop, "send", mine, "later", *keyed, "--json"))
    named = ("--topic", mine, "--timer-key", "k")
    (cancelled,) = rows(duemq(cluster, shop, "timer", "cancel", *named, "--json"))
    assert cancelled["outcome"] == "cancelled"
    for command, said in (
        (("send", other, "now"), f"send to topic {other}"),
        (("send", other, "later", *keyed), f"send to topic {other}"),
        (("tail", mine), f"receive from topic {mine}"),
        (("consume", mine, "--group", "g"), "consume in group g"),
        (("timer", "hold", "--topic", mine), "administer"),
        (("schedule", "list"), "use schedule *"),
        (("topic", "delete", mine, "--yes"), "administer"),
        (("cluster", "forget", BROKER, "--yes"), "administer"),
        (("replica", "lead", f"{BROKER}/b"), "administer"),
    ):
        done = duemq(cluster, shop, *command)
        assert done.returncode == 1, (command, done)
        assert f"anybody may not {said}" in done.stderr, (command, done)


def test_a_context_keeps_the_files(cluster: EmbeddedCluster, mine: Tls, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DUEMQ_")}
    environment |= {"XDG_CONFIG_HOME": str(tmp_path)}

    def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "duemq_cli", *arguments]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=2 * WAIT_S,
            check=False,
            env=environment,
            cwd=cwd,
        )

    names = {"ca": "ca.pem", "cert": "mine.pem", "key": "mine.key"}
    files = [part for name, path in names.items() for part in (f"--tls-{name}", path)]
    added = run(
        *("context", "add", "tls", cluster.nameserver, *files, "--json"),
        cwd=Path(mine.ca).parent,
    )
    assert rows(added)[0]["tls"] is True
    assert rows(run("cluster", "show", "--json", cwd=tmp_path))


def test_spans_are_stored(cluster: EmbeddedCluster, mine: Tls) -> None:
    client = ClientSettings(tls=mine)

    def stored() -> bool:
        with Admin(cluster.nameserver, settings=client) as admin, suppress(TopicNotFound):
            return admin.describe_topic("%TRACE%").messages > 0
        return False

    sent = duemq(cluster, mine, "send", topic_name(), "traced", DUEMQ_TRACING="duemq")
    assert sent.returncode == 0, sent.stderr
    until(stored)
