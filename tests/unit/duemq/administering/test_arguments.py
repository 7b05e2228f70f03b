"""Arguments of a wrong type are named, before anybody is asked."""

import inspect

import pytest

from duemq import aio
from duemq.administering.letters.dead_letters import Selection
from duemq.administering.letters.resending import Resending
from duemq.administering.topics import Topics
from duemq.errors import InvalidArgument
from duemq.protocol.retry_policy import policy_of

WRONG = {
    "str": [5, b"t", None, ["t"], "\ud800"],
    "bool": [1, "yes", None],
    "int": ["5", 1.0, None, True],
    "float": ["5", None, True],
    "bytes": ["text", bytearray(b"x")],
}
ANY = {"topic": "t", "group": "g", "shard": 0, "by": "5s"}


def wrong_arguments():
    for name, method in inspect.getmembers(aio.Admin, inspect.isfunction):
        if name.startswith("_") or name in ("start", "close"):
            continue
        for argument, each in inspect.signature(method).parameters.items():
            kind, optional, _ = str(each.annotation).partition(" | None")
            for value in WRONG.get(kind, ()):
                if not (optional and value is None):
                    yield pytest.param(name, argument, value, id=f"{name}-{argument}-{value!a}")


async def call(method, **arguments):
    answer = method(**arguments)
    if inspect.isasyncgen(answer):
        return [each async for each in answer]
    return await answer


@pytest.mark.parametrize(("name", "argument", "value"), list(wrong_arguments()))
async def test_a_wrong_type_is_named_at_once(name, argument, value):
    method = getattr(aio.Admin("nobody"), name)
    required = {
        each.name: ANY.get(each.name, "x")
        for each in inspect.signature(method).parameters.values()
        if each.default is each.empty
    }
    with pytest.raises(InvalidArgument) as raised:
        await call(method, **(required | {argument: value}))
    assert raised.value.field == argument
    assert raised.value.value == str(value)[:200]


def test_every_method_of_the_admin_client_is_checked():
    """Those that come as well: it is their base class that does it."""
    found = {argument.values[:2] for argument in wrong_arguments()}
    assert ("count_timers", "topic", None) not in [each.values for each in wrong_arguments()]
    assert {("create_topic", "name"), ("dead_letters", "limit"), ("forget", "timer")} <= found
    assert len({name for name, _ in found}) > 25


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"group": 5}, "group"),
        ({"group": "g", "limit": "5"}, "limit"),
        ({"group": "g", "key": 5}, "key"),
        ({"group": "g", "resent": "yes"}, "resent"),
    ],
)
def test_dead_letters_are_chosen_by_what_is_checked(arguments, field):
    """By both faces, each in its own way."""
    with pytest.raises(InvalidArgument) as raised:
        Selection(**arguments).request()
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"queues": -1}, "queues"),
        ({"queues": 2**70}, "queues"),
        ({"message_bytes_max": 2**32}, "message_bytes_max"),
        ({"brokers": 5}, "brokers"),
        ({"brokers": "broker-0"}, "brokers"),
        ({"brokers": [5]}, "brokers"),
        ({"brokers": []}, "brokers"),
    ],
)
async def test_a_topic_is_not_made_of_anything_else(arguments, field):
    with pytest.raises(InvalidArgument) as raised:
        await aio.Admin("nobody").create_topic("t", **arguments)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("name", "arguments", "field"),
    [
        ("next_occurrences", {"name": "x", "count": 0}, "count"),
        ("next_occurrences", {"name": "x", "count": 2**40}, "count"),
        ("put_schedule", {"name": "x", "topic": "t", "every": "soon"}, "every"),
        ("put_schedule", {"name": "x", "topic": "t", "every": "1h", "jitter": []}, "jitter"),
        ("find_messages", {"topic": "t", "timeout_s": -1.5}, "timeout_s"),
        ("describe_message", {"topic": "t", "message_id": "x", "timeout_s": 1e99}, "timeout_s"),
        ("reset_offsets", {"group": "g", "topic": "t", "to": "latest", "queues": 5}, "queues"),
        ("reset_offsets", {"group": "g", "topic": "t", "to": "latest", "queues": [5]}, "queues"),
        ("put_group", {"name": "g", "retry_delays": 5}, "retry_delays"),
        ("put_group", {"name": "g", "retry_delays": ["soon"]}, "retry_delays"),
        ("put_group", {"name": "g", "exponential": 5}, "exponential"),
        ("put_group", {"name": "g", "exponential": (1, "2", 3)}, "multiplier"),
        ("put_schedule", {"name": "x", "topic": "%TIMER%", "every": "1h"}, "topic"),
    ],
)
async def test_other_arguments_are_named_as_the_caller_wrote_them(name, arguments, field):
    with pytest.raises(InvalidArgument) as raised:
        await getattr(aio.Admin("nobody"), name)(**arguments)
    assert raised.value.field == field


def test_a_function_that_would_not_run_is_not_told_of_letters():
    async def awaited(letter, outcome):
        """Nobody awaits it."""

    for wrong in (5, awaited):
        with pytest.raises(InvalidArgument, match="on_sent"):
            Resending(wrong)


def test_signatures_stay_what_they_are():
    assert list(inspect.signature(Topics.delete_topic).parameters) == ["self", "name"]
    assert inspect.iscoroutinefunction(Topics.delete_topic)
    assert policy_of(3, "10s 30s").delays_ms == (10_000, 30_000)


async def test_a_range_that_ends_as_time_begins_is_told_without_a_none():
    with pytest.raises(InvalidArgument, match="after 1970: nothing lies between"):
        _ = [each async for each in aio.Admin("nobody").dead_letters("g", until=0)]
