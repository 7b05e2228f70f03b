"""Programs made of protos/, and a cluster that speaks TLS only and serves nobody without rights."""

import json

import pytest

from duemq import Admin, Producer
from duemq.settings import ClientSettings, ProducerSettings
from duemq_server.local_cluster import EmbeddedCluster
from tests.certificates import authority, certificate, needs_openssl
from tests.clients.programs import CLIENTS, CONSUMERS, TIMER_KEYS, command_of, run

ALLOWED = """
[[allow]]
names = ["server"]
service = true

[[allow]]
names = ["mine"]
admin = true

[[allow]]
names = ["stranger"]
receive = ["*"]
"""
pytestmark = [needs_openssl, pytest.mark.toolchain, pytest.mark.cluster]


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def mine(ca):
    return certificate(ca, "mine", san="DNS:me")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, ca):
    tls = certificate(ca, "server")
    directory = tmp_path_factory.mktemp("tls-cluster")
    (directory / "permissions.toml").write_text(ALLOWED)
    permitted = ("--permissions", str(directory / "permissions.toml"))
    flags = dict.fromkeys(("nameserver", "broker", "timer"), permitted)
    with EmbeddedCluster(
        directory / "data", brokers=1, tls=tls, verify_clients=True, flags=flags
    ) as running:
        yield running


def variables_of(tls):
    return {"DUEMQ_TLS_CA": tls.ca, "DUEMQ_TLS_CERT": tls.cert, "DUEMQ_TLS_KEY": tls.key}


@pytest.mark.parametrize("language", CLIENTS)
def test_a_generated_client_speaks_tls(language, cluster, mine):
    command = command_of(language, CLIENTS)
    done = run(command, cluster.nameserver, f"clients-{language}", **variables_of(mine))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]


@pytest.mark.parametrize("language", TIMER_KEYS)
def test_a_generated_client_keeps_timers_under_keys_over_tls(language, cluster, mine, stubs):
    command = command_of(language, TIMER_KEYS)
    topic = f"timer-keys-{language}"
    with Admin(cluster.nameserver, settings=ClientSettings(tls=mine)) as admin:
        admin.create_topic(topic, queues=1)
    done = run(command, cluster.nameserver, topic, PYTHONPATH=str(stubs), **variables_of(mine))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ok": True}


@pytest.mark.parametrize("language", CONSUMERS)
def test_a_generated_consumer_speaks_tls(language, cluster, mine, stubs):
    command = command_of(language, CONSUMERS)
    topic = group = f"tls-{language}"
    settings = ProducerSettings(client=ClientSettings(tls=mine))
    with Producer(cluster.nameserver, settings=settings) as producer:
        producer.send(topic, b"fail")
    # It comes again, through the group's %RETRY% topic.
    place = (cluster.nameserver, group, topic, "1")
    done = run(command, *place, PYTHONPATH=str(stubs), **variables_of(mine))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"body": "fail", "tag": "", "attempt": 1}


@pytest.mark.parametrize("language", CONSUMERS)
def test_a_generated_consumer_ends_where_it_has_no_right(language, cluster, ca, mine, stubs):
    command = command_of(language, CONSUMERS)
    topic = group = f"denied-{language}"
    with Admin(cluster.nameserver, settings=ClientSettings(tls=mine)) as admin:
        admin.create_topic(topic, queues=1)
    stranger = certificate(ca, "stranger", san="DNS:stranger")
    place = (cluster.nameserver, group, topic, "1")
    done = run(command, *place, PYTHONPATH=str(stubs), **variables_of(stranger))
    assert done.returncode != 0
    assert "PERMISSION_DENIED" in done.stderr
    assert group in done.stderr
