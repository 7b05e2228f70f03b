"""Names of delayed messages and of schedules, and which timer shard has them.  Pure.

Keys and schedules are divided over as many shards as there were first, queues of %TIMER% over as
many as there are.
"""

import re
from zlib import crc32

from duemq.protocol import checks, names

TIMER_KEY_CHARACTERS_MAX = 255
SCHEDULE_RECORDS_MAX = 1_000
"""Of one request of Schedule or Reschedule."""
REQUEST_ID_BYTES = 16
REPEAT_S = 110.0
"""So long a request may be repeated: a shard knows it again for 10 s more."""

# Neither control characters nor halves of UTF-16 pairs, which UTF-8 does not have.
_TIMER_KEY = re.compile(
    rf"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{TIMER_KEY_CHARACTERS_MAX}}}", re.DOTALL
)
_SCHEDULE = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.|-]{1,127}")
_SCHEDULE_RULE = "1 to 127 of [A-Za-z0-9_.|-], and neither . nor .."
_RULE = f"text of 1 to {TIMER_KEY_CHARACTERS_MAX} characters, none of them a control character"


def check_timer_key(key: object, field: str = "timer_key") -> None:
    """Raises InvalidArgument unless `key` may name a delayed message."""
    checks.matches(field, key, _TIMER_KEY, _RULE)


def check_selection(topic: str, key_prefix: str) -> None:
    """Raises InvalidArgument unless these are some delayed messages' topic and keys; "": all."""
    names.check_topic(topic)
    if key_prefix != "":
        check_timer_key(key_prefix, "key_prefix")


def check_move(topic: str, to_topic: str) -> None:
    """Raises InvalidArgument unless delayed messages of `topic` may go to `to_topic` instead."""
    names.check_topic(to_topic, "to_topic")
    if names.is_system(to_topic) or to_topic == topic:
        raise checks.wrong("to_topic", to_topic, "another topic of your own")


def check_keyed_topic(topic: str) -> None:
    """Raises InvalidArgument unless messages of `topic` may have timer keys, or repeat."""
    names.check_topic(topic)
    if names.is_system(topic):
        raise checks.wrong("topic", topic, "timer keys and schedules are of topics of your own")


def shard_of(topic: str, key: str, shards: int) -> int:
    """The number of the shard, of so many, that keeps what waits under the key."""
    return crc32(f"{topic}\0{key}".encode()) % shards


def check_schedule_name(name: object) -> None:
    """Raises InvalidArgument unless `name` may name a schedule: as a topic of one's own."""
    checks.matches("name", name, _SCHEDULE, _SCHEDULE_RULE)


def shard_of_schedule(name: str, shards: int) -> int:
    """The number of the shard, of so many, that keeps the schedule of that name."""
    return crc32(name.encode()) % shards


def shard_of_queue(queue_id: int, shards: int) -> int:
    """The number of the shard, of so many, that takes over what comes through a queue of %TIMER%.

    What is known by a handle may be another shard's: their number may have changed since.
    """
    return queue_id % shards
