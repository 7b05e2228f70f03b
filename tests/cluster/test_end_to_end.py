"""Send, delay, cancel, consume: the whole path over real processes."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from duemq import Admin, Producer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.checker import judge
from tests.cluster.harness import topic_name, until
from tests.cluster.history import History

COUNT = 300
NEVER_S = 3_600.0  # it is cancelled before
EARLIEST = ConsumerSettings(start_from="earliest")


def test_every_message_reaches_every_group_once_and_never_early(cluster: EmbeddedCluster) -> None:
    topic, history, handles = topic_name(), History(), []
    groups = [f"{topic}-{name}" for name in ("a", "b")]
    with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:
        admin.create_topic(topic)
        for number in range(COUNT):
            delay = (None, 0.5 + number % 7 / 10, NEVER_S)[number % 3]
            key = f"tail-{number % 5}"
            receipt = history.send(producer, topic, f"m{number}", delay=delay, ordering_key=key)
            assert receipt is not None
            if delay == NEVER_S:
                handles.append((f"m{number}", receipt.handle))
        outcomes = admin.cancel([handle for _, handle in handles])
        for (id, _), outcome in zip(handles, outcomes, strict=True):
            history.add("cancelled", id, outcome=outcome.value)
        assert {outcome.value for outcome in outcomes} == {"cancelled"}
    expected = COUNT - len(handles)
    consumers = [
        PushConsumer(
            group, topic, history.receiver(group), nameserver=cluster.nameserver, settings=EARLIEST
        )
        for group in (groups[0], groups[0], groups[1])
    ]
    with ExitStack() as running:
        for consumer in consumers:
            running.enter_context(consumer)
        until(lambda: all(history.count("received", group=g) >= expected for g in groups))
    history.stored(read_topic(cluster.nameserver, topic))
    verdict = judge(ordered_only_undelayed(history), groups)
    assert verdict.faults == []
    assert verdict.stored == expected


def ordered_only_undelayed(history: History) -> list[dict[str, object]]:
    """Delayed messages come in the order of their due times, not of their sending."""
    delayed = {e["id"] for e in history.events if e["event"] == "acked" and e["due_ms"]}
    return [
        {**event, "key": None} if event["event"] == "sent" and event["id"] in delayed else event
        for event in history.events
    ]


def test_a_group_goes_on_where_it_was(cluster: EmbeddedCluster) -> None:
    topic, history = topic_name(), History()
    with Producer(cluster.nameserver) as producer:
        for half in range(2):
            ids = [f"m{half}-{number}" for number in range(20)]
            for id in ids:
                history.send(producer, topic, id)
            receive = history.receiver(topic)
            with PushConsumer(
                topic, topic, receive, nameserver=cluster.nameserver, settings=EARLIEST
            ):
                until(lambda half=half: history.count("received", group=topic) >= 20 * (half + 1))  # type: ignore[misc]
    history.stored(read_topic(cluster.nameserver, topic))
    verdict = judge(history.events, [topic])
    assert verdict.faults == []
    assert verdict.repeated == {topic: 0}


@pytest.mark.parametrize("delay", [0, 0.05])
def test_a_due_time_that_is_now_is_delivered_at_once(
    cluster: EmbeddedCluster, delay: float
) -> None:
    topic, history = topic_name(), History()
    with Producer(cluster.nameserver) as producer:
        history.send(producer, topic, "m", delay=delay)
        receive = history.receiver(topic)
        with PushConsumer(topic, topic, receive, nameserver=cluster.nameserver, settings=EARLIEST):
            until(lambda: history.count("received", group=topic) == 1)
    history.stored(read_topic(cluster.nameserver, topic))
    assert judge(history.events, [topic]).faults == []
