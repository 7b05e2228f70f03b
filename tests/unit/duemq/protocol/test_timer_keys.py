"""Timer keys: what one may be, and whose it is."""

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol import timer_keys


@pytest.mark.parametrize("key", ["k", "x" * 255, "Bestellung 17 ü", "😀", "a\u00a0b", " "])
def test_keys(key):
    timer_keys.check_timer_key(key)
    assert timer_keys.shard_of("t", key, 1) == 0


@pytest.mark.parametrize("key", ["", "x" * 256, "a\0b", "a\n", "\x7f", "a\x85b", "\ud800", None, 5])
def test_what_is_none(key):
    with pytest.raises(InvalidArgument, match=r"timer_key: .*1 to 255 characters"):
        timer_keys.check_timer_key(key)


def test_the_shard_of_a_key_never_changes():
    """Timers lie where this rule put them; clients in other languages have it, too."""
    found = [timer_keys.shard_of("orders", f"k{n}", 7) for n in range(10)]
    assert found == [0, 0, 5, 6, 5, 3, 4, 3, 2, 4]
    assert timer_keys.shard_of("bestellungen", "größe", 1024) == 81
    assert timer_keys.shard_of("a", "b", 1024) != timer_keys.shard_of("ab", "", 1024)


def test_the_shard_of_a_queue_never_changes():
    assert [timer_keys.shard_of_queue(queue_id, 3) for queue_id in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("topic", ["%TRACE%", "%RETRY%g", "%TIMER%", "a b", ""])
def test_topics_without_timer_keys(topic):
    with pytest.raises(InvalidArgument):
        timer_keys.check_keyed_topic(topic)
    timer_keys.check_keyed_topic("orders")
