"""Frames and landing of a cluster that speaks TLS only, and serves nobody without a certificate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from duemq import Producer, ProducerSettings
from duemq.settings import ClientSettings
from duemq_server.local_cluster import EmbeddedCluster
from tests.certificates import authority, certificate, needs_openssl
from tests.cluster.harness import topic_name

pytestmark = [pytest.mark.spark, needs_openssl]


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    ca = authority(tmp_path_factory.mktemp("certificates"))
    return certificate(ca, "mine", san="DNS:me")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, mine):
    tls = certificate(Path(mine.ca), "server")
    directory = tmp_path_factory.mktemp("cluster")
    with EmbeddedCluster(directory, brokers=1, tls=tls, verify_clients=True) as embedded:
        yield embedded


def options(cluster, tls):
    return {
        "nameserver": cluster.nameserver,
        "tlsCa": tls.ca,
        "tlsCert": tls.cert,
        "tlsKey": tls.key,
    }


def test_rows_are_written_and_read(spark, cluster, mine):
    topic = topic_name()
    frame = spark.sql("SELECT concat('b', id) AS body FROM range(0, 100, 1, 2)")
    frame.write.format("duemq").mode("append").options(**options(cluster, mine), topic=topic).save()
    reader = spark.read.format("duemq").options(**options(cluster, mine), topic=topic)
    assert {row.body for row in reader.load().collect()} == {b"b%d" % i for i in range(100)}


@pytest.mark.long
def test_without_a_certificate_it_is_said_what_is_missing(spark, cluster, mine):
    given = options(cluster, mine)
    del given["tlsCert"], given["tlsKey"]
    reader = spark.read.format("duemq").options(**given, topic="t", timeoutSeconds="5")
    with pytest.raises(PySparkException, match="speaks TLS, but no connection came of it"):
        reader.load().collect()


@pytest.mark.long
def test_a_trace_topic_is_landed(cluster, mine, tmp_path):
    """By the command, whose certificates are in its environment."""
    topic = topic_name()
    settings = ProducerSettings(client=ClientSettings(tls=mine))
    with Producer(cluster.nameserver, settings=settings) as producer:
        producer.send(topic, b"not a batch of spans")
    variables = {
        "DUEMQ_TLS_CA": mine.ca,
        "DUEMQ_TLS_CERT": mine.cert,
        "DUEMQ_TLS_KEY": mine.key,
    }
    command = [sys.executable, "-m", "duemq_analytics", "land", "--once", "--json"]
    command += ["--nameserver", cluster.nameserver, "--output", str(tmp_path / "lake")]
    done = subprocess.run(
        [*command, "--trace-topic", topic],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    landed = json.loads(done.stdout.splitlines()[-1])
    assert (landed["spans"], landed["undecodable"]) == (0, 1)
