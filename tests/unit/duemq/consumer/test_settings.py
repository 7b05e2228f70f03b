from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from duemq.consumer.fetching.subscription import SUBSCRIPTIONS_MAX, subscriptions_of
from duemq.consumer.settings import ConsumerSettings, Window, check_choices, resolved, start_ms
from duemq.errors import InvalidArgument


def test_the_defaults_are_the_documented_ones() -> None:
    settings = ConsumerSettings()
    assert settings.window == Window(messages=1_000, bytes=100 * 1024 * 1024, span=2_000)
    assert (settings.start_from, settings.commit_interval_s) == ("latest", 5.0)
    assert (settings.session_timeout_s, settings.strategy) == (10.0, "average")
    assert (settings.processing_timeout_s, settings.suspend_s) == (900.0, 1.0)
    assert (settings.retries_in_order_max, settings.offsets_dir) == (16, "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("start_from", "newest"),
        ("start_from", None),
        ("start_from", True),
        ("start_from", -1),
        ("start_from", 1_790_000_000),
        ("start_from", "1h"),
        ("start_from", "now"),
        ("start_from", "-1x"),
        ("start_from", datetime(2026, 1, 1)),
        ("processing_timeout_s", 0),
        ("suspend_s", 0),
        ("retries_in_order_max", -1),
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
        ("threads", "20"),
        ("threads", 2.5),
        ("threads", True),
        ("queue_messages_max", 1.5),
        ("retries_in_order_max", None),
        ("processing_timeout_s", "5"),
        ("processing_timeout_s", float("nan")),
        ("suspend_s", timedelta(seconds=1)),
        ("strategy", None),
        ("offsets_dir", Path("/tmp")),
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


def test_a_group_may_start_at_a_time() -> None:
    moment = datetime(2026, 11, 21, 16, 0, 0, 999, tzinfo=UTC)
    assert ConsumerSettings(start_from=moment).start_from == moment
    assert ConsumerSettings(start_from=0).start_from == 0
    assert start_ms(moment) == 1_795_276_800_000
    assert start_ms(1_795_276_800_000) == 1_795_276_800_000


@pytest.mark.parametrize(
    ("start_from", "at"),
    [
        ("-1h", 6_400_000),
        ("-90s", 9_910_000),
        ("1970-01-01T00:00:05Z", 5_000),
        ("earliest", "earliest"),
        ("latest", "latest"),
        (7, 7),
    ],
)
def test_a_group_may_start_so_long_ago(start_from: str | int, at: str | int) -> None:
    assert resolved(ConsumerSettings(start_from=start_from).start_from, 10_000_000) == at


def with_yield(message):
    yield


async def with_yield_and_async(message):
    yield


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("order", "topic"),
        ("member_name", ""),
        ("member_name", ".."),
        ("member_name", "a/b"),
        ("member_name", "x" * 128),
        ("member_name", 5),
        ("group", ""),
        ("group", None),
        ("callback", None),
        ("callback", with_yield),
        ("callback", with_yield_and_async),
    ],
)
def test_a_consumer_that_cannot_be_is_refused_by_field(field: str, value: object) -> None:
    legal = {"group": "billing", "callback": print, "order": "key", "member_name": "pod-3"}
    with pytest.raises(InvalidArgument) as refused:
        check_choices(**{**legal, field: value})
    assert refused.value.field == field
    check_choices(**legal)


def test_topics_may_be_named_in_three_ways() -> None:
    assert list(subscriptions_of("orders")) == ["orders"]
    assert list(subscriptions_of(["orders", "bills"])) == ["orders", "bills"]
    named = subscriptions_of({"orders": "a || b", "bills": None})
    assert named["orders"].text == "a || b"
    assert named["orders"].tags.tags == {"a", "b"}
    assert named["bills"].takes_all


@pytest.mark.parametrize(
    ("topics", "field"),
    [
        ([], "topics"),
        ({}, "topics"),
        ("", "topics"),
        ([f"t{n}" for n in range(SUBSCRIPTIONS_MAX + 1)], "topics"),
        ({"orders": "a ||"}, "filter"),
        ({"orders": 5}, "filter"),
        (None, "topics"),
        (b"orders", "topics"),
        (["orders", 5], "topics"),
    ],
)
def test_wrong_topics_are_refused_by_field(topics, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        subscriptions_of(topics)
    assert refused.value.field == field
