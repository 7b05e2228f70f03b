"""Where a message id of the SDK is looked for first."""

import pytest

from duemq.administering import finding
from duemq.administering.finding import STORED_AFTER_MS, STORED_BEFORE_MS
from duemq.protocol import message_ids
from duemq.v1 import message_admin_pb2

HOUR_MS = 3_600_000
NOW_MS = 2_000_000_000_000


def id_of(begun_ms: int) -> str:
    return (message_ids.MessageIds().head(begun_ms) + b"00a").decode()


def ranges(message_id: str, topic: str = "orders", **times: int) -> list[tuple[int, int]]:
    request = message_admin_pb2.FindMessagesRequest(topic=topic, message_id=message_id, **times)
    return [(each.from_ms, each.to_ms) for each in finding._ranges(request, NOW_MS)]


def test_the_minutes_around_the_making_of_an_id_come_first() -> None:
    begun = NOW_MS - HOUR_MS
    low, high = begun - STORED_BEFORE_MS, begun + STORED_AFTER_MS
    assert ranges(id_of(begun)) == [(low, high), (0, 0)]
    since, until = begun - 10, begun + 10
    assert ranges(id_of(begun), from_ms=since, to_ms=until) == [(since, until)] * 2
    assert ranges(id_of(begun), to_ms=NOW_MS) == [(low, high), (0, NOW_MS)]
    ahead = NOW_MS + HOUR_MS
    assert ranges(id_of(ahead))[0] == (ahead - STORED_BEFORE_MS, ahead + STORED_AFTER_MS)


@pytest.mark.parametrize(
    "message_id",
    ["", "17", "g" * 28, "F" * 28, id_of(NOW_MS)[1:], id_of(NOW_MS + HOUR_MS + 1)],
    ids=["empty", "short", "no digits", "capitals", "cut off", "of the future"],
)
def test_of_an_id_without_a_time_there_is_no_such_range(message_id: str) -> None:
    assert ranges(message_id) == [(0, 0)]


def test_neither_where_it_lies_outside_of_what_is_asked_for() -> None:
    begun = NOW_MS - 5 * HOUR_MS
    assert ranges(id_of(begun), from_ms=begun + HOUR_MS) == [(begun + HOUR_MS, 0)]
    assert ranges(id_of(begun), to_ms=begun - HOUR_MS) == [(0, begun - HOUR_MS)]
    assert ranges(id_of(0)) == [(0, 0)]


def test_neither_where_all_copies_are_wanted() -> None:
    for topic in ("%RETRY%g", "%DLQ%g", "%TIMER%"):
        assert ranges(id_of(NOW_MS), topic) == [(0, 0)]
