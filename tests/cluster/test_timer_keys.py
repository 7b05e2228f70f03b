"""Timers under keys through command line and SDK, with kill -9 of the timer shard in between."""

from __future__ import annotations

import threading

import pytest

from duemq import CancelOutcome, Outgoing, Producer, RescheduleOutcome
from duemq.errors import TimerExists
from duemq_cli.exits import Exit
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import duemq, rows, topic_name, until


def bodies(cluster: EmbeddedCluster, topic: str) -> list[str]:
    """All that is in the topic."""
    return sorted(message.body.decode() for message in read_topic(cluster.nameserver, topic))


@pytest.mark.long
def test_answers_hold_over_kill9(cluster: EmbeddedCluster) -> None:
    topic = topic_name()

    def kill() -> None:
        cluster.kill("timer-0")
        cluster.wait_ready()

    with Producer(cluster.nameserver) as producer:
        first = producer.send(topic, b"first", timer_key="a", delay="1h")
        other = producer.send(topic, b"other", timer_key="b", delay="1h")
        kill()
        second = producer.send(topic, b"second", timer_key="a", delay="1h")
        assert second.replaced == first.handle
        kill()
        with pytest.raises(TimerExists) as raised:
            producer.send(topic, b"third", timer_key="a", delay=0, if_absent=True)
        assert (raised.value.handle, raised.value.due_ms) == (second.handle, second.due_ms)
        assert producer.cancel(key=(topic, "b")) is CancelOutcome.CANCELLED
        kill()
        assert producer.cancel(other) is CancelOutcome.CANCELLED
        assert producer.cancel(first) is CancelOutcome.CANCELLED
        moved = producer.reschedule(key=(topic, "a"), delay=0)
        assert moved.outcome is RescheduleOutcome.RESCHEDULED
        until(lambda: bodies(cluster, topic) == ["second"])
        kill()
        assert producer.cancel(key=(topic, "a")) is CancelOutcome.FIRED
        fresh = producer.send(topic, b"fourth", timer_key="a", delay=0)
        assert fresh.replaced is None
        until(lambda: bodies(cluster, topic) == ["fourth", "second"])


def test_a_send_that_waits_for_the_shard_is_stored_once(cluster: EmbeddedCluster) -> None:
    topic = topic_name()
    with Producer(cluster.nameserver) as producer:
        producer.send(topic, b"0", timer_key="k0", delay=0)
        cluster.kill("timer-0")
        back = threading.Thread(target=cluster.wait_ready)
        back.start()
        messages = [Outgoing(b"%d" % n, timer_key=f"k{n}", delay=0) for n in range(1, 200)]
        receipts = producer.send_many(topic, messages)
        back.join()
        assert {each.replaced for each in receipts} == {None}
    until(lambda: len(bodies(cluster, topic)) >= 200)
    assert bodies(cluster, topic) == sorted(map(str, range(200)))


def test_the_command_line(cluster: EmbeddedCluster) -> None:
    nameserver, topic = cluster.nameserver, topic_name()
    send = ("send", topic, "--delay", "1h", "--timer-key", "k", "--json")
    (first,) = rows(duemq(nameserver, *send, "first"))
    (second,) = rows(duemq(nameserver, *send, "second"))
    assert second["replaced"] == first["handle"]
    refused = duemq(nameserver, *send, "third", "--if-absent")
    assert refused.returncode == Exit.FAILED
    key = ("--topic", topic, "--timer-key", "k")
    (moved,) = rows(duemq(nameserver, "timer", "reschedule", *key, "--delay", "0s", "--json"))
    assert moved["outcome"] == "rescheduled"
    until(lambda: bodies(cluster, topic) == ["second"])
    late = duemq(nameserver, "timer", "cancel", *key, "--json")
    assert late.returncode == Exit.FAILED
    assert '"fired"' in late.stdout
    shown = rows(duemq(nameserver, "cluster", "show", "--json"))
    [timer] = [row for row in shown if row["kind"] == "timer"]
    assert timer["replaced"] >= 2
    assert timer["accepted"] == sum(
        timer[name] for name in ("pending", "fired", "cancelled", "replaced", "lost")
    )
