import pytest

from duemq.errors import (
    InvalidArgument,
    QueueNotFound,
    TopicExists,
    TopicNotFound,
    TopicReplaced,
)
from duemq.protocol import names
from duemq_server.broker.store.topics import QUEUES_MAX, Topics


def topics() -> Topics:
    return Topics(default_queues=4, message_bytes_max=1_000)


def made(name: str = "orders", **fields: int) -> Topics:
    table = topics()
    table.put(table.plan(name, **fields))
    return table


def test_a_topic_has_the_brokers_defaults_unless_it_says() -> None:
    topic = made().find("orders")
    assert topic.queues == 4
    assert topics().limit(topic) == 1_000
    assert topics().limit(made(message_bytes_max=10).find("orders")) == 10


@pytest.mark.parametrize(
    "name",
    [
        *("", "a" * 128, "a b", "a/b", "..", "ä", "a\n", "%FOO%", "a%b"),
        *("%RETRY%", "%DLQ%", "%RETRY%a b", "%RETRY%" + "g" * 128, "%DLQ%" + "g" * 128),
    ],
)
def test_illegal_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        topics().plan(name)
    assert caught.value.field == "topic"
    assert caught.value.limit


@pytest.mark.parametrize("name", ["a", "a" * 127, "A-b_c|9", "%TRACE%", "%RETRY%g", "%DLQ%g"])
def test_legal_names_pass(name: str) -> None:
    assert topics().plan(name).name == name


@pytest.mark.parametrize("group", ["g", "g" * 127, "a%b", "%RETRY%g", "A-b_c|9"])
def test_every_group_has_topics_of_its_own(group: str) -> None:
    names.check_own_group(group)
    for topic in (names.retry_topic(group), names.dead_letter_topic(group)):
        assert topics().plan(topic).queues == 1
        assert topics().plan(topic, queues=3).queues == 3
        assert names.group_of(topic) == group
    assert names.is_retry(names.retry_topic(group))
    assert not names.is_retry(names.dead_letter_topic(group))


def test_other_topics_are_no_groups() -> None:
    assert [names.group_of(name) for name in ("orders", "%TIMER%", "%TRACE%")] == ["", "", ""]


@pytest.mark.parametrize(
    "fields", [{"queues": -1}, {"queues": QUEUES_MAX + 1}, {"message_bytes_max": 1_001}]
)
def test_numbers_beyond_the_limits_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        topics().plan("orders", **fields)
    assert caught.value.field in fields


def test_a_topic_is_made_once_and_deleted_once() -> None:
    table = made()
    with pytest.raises(TopicExists):
        table.plan("orders")
    first = table.remove("orders")
    with pytest.raises(TopicNotFound):
        table.find("orders")
    assert table.plan("orders").id > first.id


def test_a_queue_beyond_the_topics_is_not_found() -> None:
    table = made()
    assert table.queue("orders", 3).name == "orders"
    for queue_id in (-1, 4):
        with pytest.raises(QueueNotFound) as caught:
            table.queue("orders", queue_id)
        assert caught.value.limit == "0 to 3"


def test_a_topic_that_was_made_anew_is_told_from_the_one_before() -> None:
    table = made()
    first = table.remove("orders")
    table.put(table.plan("orders", queues=1))
    second = table.find("orders")
    assert table.queue("orders", 0, second.id) is table.queue("orders", 0) is second
    for queue_id in (0, 3):  # also where it has fewer queues
        with pytest.raises(TopicReplaced) as caught:
            table.queue("orders", queue_id, first.id)
        assert (caught.value.value, caught.value.limit) == (str(first.id), str(second.id))


def test_who_does_not_know_of_a_topic_gives_another_id_than_who_does() -> None:
    """A log may lose its end, a disk all it has: what is made then meets nothing known of it."""
    assert len({topics().plan("orders").id for _ in range(100)}) > 90


def test_the_timer_topic_stays() -> None:
    with pytest.raises(InvalidArgument):
        made("%TIMER%").check_deletable("%TIMER%")


def test_the_checkpoint_round_trips() -> None:
    table = made(queues=7)
    again = topics()
    again.load(table.freeze()())
    assert list(again) == list(table)
    assert again.plan("other").id > table.find("orders").id
