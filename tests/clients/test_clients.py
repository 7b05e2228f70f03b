"""Programs that know nothing of DueMQ but protos/ (see README.md; `make clients` builds them)."""

import json
import os
import subprocess
import threading
from contextlib import suppress

import pytest

from duemq import Admin, Producer, PullConsumer
from duemq.errors import GroupNotFound
from duemq.protocol.limits import QUEUES_MAX
from tests.clients.played import deaf_broker, late_nameserver
from tests.clients.programs import CLIENTS, CONSUMERS, RUN_S_MAX, TIMER_KEYS, command_of, run
from tests.cluster.harness import until

pytestmark = [pytest.mark.toolchain, pytest.mark.cluster]


@pytest.mark.parametrize("language", CLIENTS)
def test_a_generated_client_sends_delays_cancels_and_pulls(language, cluster):
    command = command_of(language, CLIENTS)
    done = run(command, cluster.nameserver, f"clients-{language}")
    assert done.returncode == 0, done.stderr
    refused = "NotFound" if language in {"go", "rust"} else "NOT_FOUND"
    assert json.loads(done.stdout) == {"ok": True, "records": 4, "refused": refused}


@pytest.mark.parametrize("language", TIMER_KEYS)
def test_a_generated_client_keeps_timers_under_keys(language, cluster, stubs):
    command = command_of(language, TIMER_KEYS)
    topic = f"timer-keys-{language}"
    with Admin(cluster.nameserver) as admin:
        admin.create_topic(topic, queues=1)
    done = run(command, cluster.nameserver, topic, PYTHONPATH=str(stubs))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ok": True}
    with PullConsumer(nameserver=cluster.nameserver) as consumer:
        consumer.assign(topic, start_from="earliest")
        [message] = consumer.poll(RUN_S_MAX)
    assert (message.body, message.timer_key) == (b"fourth", "order-17")


@pytest.mark.parametrize("language", CONSUMERS)
def test_a_generated_consumer_commits_seeks_and_sends_back(language, cluster, stubs):
    command = command_of(language, CONSUMERS)
    topic = f"consumer-{language}"
    with Admin(cluster.nameserver) as admin:
        admin.create_topic(topic, queues=2)

    def send(*bodies):
        with Producer(cluster.nameserver) as producer:
            for number, body in enumerate(bodies):
                producer.send(topic, body.encode(), tag="t", ordering_key=str(number))

    def consumed(count, *start):
        place = (cluster.nameserver, f"group-{language}", topic, str(count))
        done = run(command, *place, *start, PYTHONPATH=str(stubs))
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert {line["tag"] for line in lines} == {"t"}
        return sorted((line["body"], line["attempt"]) for line in lines)

    first = [f"first-{number}" for number in range(10)]
    second = [f"second-{number}" for number in range(5)]
    send(*first, "fail")
    # The failed one comes again, through the group's %RETRY% topic.
    assert consumed(11) == sorted([("fail", 1), *((body, 0) for body in first)])
    send(*second)
    assert consumed(5) == [(body, 0) for body in second]  # from where the group is
    # The failed one is settled for good.
    assert consumed(15, "earliest") == [(body, 0) for body in first + second]


@pytest.mark.parametrize("language", CONSUMERS)
def test_a_generated_consumer_goes_on_in_a_topic_made_anew_with_more_queues_and_brokers(
    language, cluster, stubs
):
    command = command_of(language, CONSUMERS)
    topic = group = f"anew-{language}"
    bodies = sorted(f"new-{number:02}" for number in range(20))
    place = (cluster.nameserver, group, topic, str(1 + len(bodies)))
    with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:

        def committed():
            with suppress(GroupNotFound):
                return [each.offset for each in admin.describe_group(group).progress] == [1]
            return False

        admin.create_topic(topic, queues=1, brokers=cluster.names("broker")[:1])
        producer.send(topic, b"old")
        environment = os.environ | {"PYTHONPATH": str(stubs)}
        with subprocess.Popen(
            [*command, *place], stdout=subprocess.PIPE, text=True, env=environment
        ) as program:
            watchdog = threading.Timer(RUN_S_MAX, program.kill)
            watchdog.start()
            try:
                until(committed)
                admin.delete_topic(topic)
                admin.create_topic(topic, queues=2)
                for number, body in enumerate(bodies):
                    producer.send(topic, body.encode(), ordering_key=str(number))
                seen = [json.loads(line)["body"] for line in program.stdout]
                assert program.wait() == 0
            finally:
                watchdog.cancel()
                program.kill()
    assert sorted(seen) == [*bodies, "old"]


@pytest.mark.parametrize("language", CONSUMERS)
def test_a_generated_consumer_takes_no_broker_for_another(language, cluster, stubs):
    command = command_of(language, CONSUMERS)
    topic = group = f"address-{language}"
    bodies = sorted(f"at-{number}" for number in range(10))
    with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:
        admin.create_topic(topic, queues=1)
        sent = [producer.send(topic, body.encode(), ordering_key=body) for body in bodies]
    assert {each.broker for each in sent} == set(cluster.names("broker"))
    with late_nameserver(cluster) as nameserver:
        place = (nameserver, group, topic, str(len(bodies)))
        done = run(command, *place, PYTHONPATH=str(stubs))
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(line)["body"] for line in done.stdout.splitlines()) == bodies
    assert "store_id: this broker has" in done.stderr  # it was refused, and asked again


@pytest.mark.parametrize("language", CONSUMERS)
def test_a_generated_consumer_repeats_a_commit_though_nothing_new_comes(language, cluster, stubs):
    command = command_of(language, CONSUMERS)
    topic = group = f"commit-{language}"
    broker = cluster.names("broker")[0]
    with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:
        admin.create_topic(topic, queues=1, brokers=[broker])
        producer.send_many(topic, [b"one", b"two"])
        with deaf_broker(cluster, broker) as nameserver:
            done = run(command, nameserver, group, topic, "2", PYTHONPATH=str(stubs))
        assert done.returncode == 0, done.stderr
        assert "not heard" in done.stderr
        assert [each.offset for each in admin.describe_group(group).progress] == [2]


@pytest.mark.parametrize("language", CONSUMERS)
def test_a_generated_consumer_says_what_is_wrong(language, cluster, stubs):
    command = command_of(language, CONSUMERS)
    done = run(command, cluster.nameserver, "g", "no-such-topic", "1", PYTHONPATH=str(stubs))
    assert done.returncode != 0
    assert "no-such-topic" in done.stderr


@pytest.mark.parametrize("language", CONSUMERS)
def test_a_generated_consumer_has_more_queues_than_one_pull_takes(language, cluster, stubs):
    command = command_of(language, CONSUMERS)
    topic = group = f"many-{language}"
    with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:
        admin.create_topic(topic, queues=QUEUES_MAX, brokers=cluster.names("broker")[:1])
        producer.send(topic, b"fail")
    # It comes again, through a queue of %RETRY%, which is one more.
    done = run(command, cluster.nameserver, group, topic, "1", PYTHONPATH=str(stubs))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"body": "fail", "tag": "", "attempt": 1}
