import pytest

from duemq.consumer.settings import ConsumerSettings
from duemq.consumer.subscription import SUBSCRIPTIONS_MAX, subscriptions_of
from duemq.errors import InvalidArgument
from duemq.process_queue import Window


def test_the_defaults_are_the_documented_ones() -> None:
    settings = ConsumerSettings()
    assert settings.window == Window(messages=1_000, bytes=100 * 1024 * 1024, span=2_000)
    assert (settings.start_from, settings.commit_interval_s) == ("latest", 5.0)
    assert (settings.session_timeout_s, settings.strategy) == (10.0, "average")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("start_from", "newest"),
        ("threads", 0),
        ("batch_messages_max", 0),
        ("queue_messages_max", 0),
        ("queue_bytes_max", 0),
        ("queue_span_max", 0),
        ("pull_bytes_max", 8 * 1024 * 1024 + 1),
        ("pull_wait_s", 30.1),
        ("session_timeout_s", 0.9),
        ("session_timeout_s", 301),
        ("commit_interval_s", 0),
        ("retry_wait_s_min", 0),
        ("retry_wait_s_max", 0.1),
        ("release_timeout_s", -1),
        ("close_timeout_s", -1),
        ("start_timeout_s", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ConsumerSettings(**{field: value})
    assert refused.value.field == field
    assert refused.value.value == str(value)
    assert refused.value.limit


def test_settings_can_be_overridden() -> None:
    settings = ConsumerSettings(threads=3).changed(start_from="earliest")
    assert (settings.threads, settings.start_from) == (3, "earliest")
    assert settings.changed(threads=5).threads == 5
    with pytest.raises(InvalidArgument):
        settings.changed(threads=-1)


def test_topics_may_be_named_in_three_ways() -> None:
    assert list(subscriptions_of("orders")) == ["orders"]
    assert list(subscriptions_of(["orders", "bills"])) == ["orders", "bills"]
    named = subscriptions_of({"orders": "a || b", "bills": None})
    assert named["orders"][0] == "a || b"
    assert named["orders"][1].tags == {"a", "b"}
    assert named["bills"][1].takes_all


@pytest.mark.parametrize(
    ("topics", "field"),
    [
        ([], "topics"),
        ({}, "topics"),
        ("", "topics"),
        ([f"t{n}" for n in range(SUBSCRIPTIONS_MAX + 1)], "topics"),
        ({"orders": "a ||"}, "filter"),
    ],
)
def test_wrong_topics_are_refused_by_field(topics, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        subscriptions_of(topics)
    assert refused.value.field == field
