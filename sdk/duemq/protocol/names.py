"""Names of topics and groups: what is legal and what belongs to the system.  Pure."""

import re

from duemq.errors import PermissionDenied
from duemq.protocol import checks

TOPIC_CHARACTERS_MAX = 127
GROUP_CHARACTERS_MAX = 127

SYSTEM_SIGN = "%"
"""The first of a name that is the system's own; in no other topic's."""
TIMER_TOPIC = "%TIMER%"
"""Messages that wait for a later time."""
TRACE_TOPIC = "%TRACE%"
"""Spans of clients and services, as messages."""
RETRY_PREFIX = "%RETRY%"
DEAD_LETTER_PREFIX = "%DLQ%"
SYSTEM_TOPIC_CHARACTERS_MAX = len(RETRY_PREFIX) + GROUP_CHARACTERS_MAX
"""Those of groups are longer than others: the prefix comes before a group's name."""

TIMER_GROUP = "%TIMER%"
# Its offset in a queue: what lies before was purged.
PURGED_GROUP = "%PURGED%"
# What it has in a dead-letter queue was sent again.
RESENT_GROUP = "%RESENT%"
# They keep state of the broker; nobody else reads or writes it by their names.
HIDDEN_GROUPS = frozenset((PURGED_GROUP, RESENT_GROUP))

_GROUP = re.compile(rf"[A-Za-z0-9_%|-]{{1,{GROUP_CHARACTERS_MAX}}}")
_GROUP_RULE = f"1 to {GROUP_CHARACTERS_MAX} of [A-Za-z0-9_%|-]"
_TOPIC = re.compile(rf"(?!\.{{1,2}}\Z)[A-Za-z0-9_.%|-]{{1,{TOPIC_CHARACTERS_MAX}}}")
_TOPIC_RULE = f"1 to {TOPIC_CHARACTERS_MAX} of [A-Za-z0-9_.|-], and neither . nor .."
_SYSTEM_TOPIC = re.compile(
    rf"{TIMER_TOPIC}|{TRACE_TOPIC}|({RETRY_PREFIX}|{DEAD_LETTER_PREFIX})({_GROUP.pattern})"
)


def check_topic(name: str, field: str = "topic") -> None:
    """Raises InvalidArgument unless `name` may name a topic."""
    if isinstance(name, str) and _SYSTEM_TOPIC.fullmatch(name):
        return
    checks.matches(field, name, _TOPIC, _TOPIC_RULE)
    if is_system(name):
        raise checks.wrong(
            field,
            name,
            "names with % belong to the system: %TRACE%, %RETRY%<group>, %DLQ%<group>",
        )


def check_sent_to(topic: str) -> None:
    """As `check_topic`; PermissionDenied for one that brokers alone write to."""
    check_topic(topic)
    if topic == TIMER_TOPIC:
        raise checks.wrong("topic", topic, "one of your own, with a delay")
    if group_of(topic):
        raise PermissionDenied(
            f"topic: {topic} holds what a group sent back: only brokers write to it",
            field="topic",
            value=topic,
        )


def check_group(name: str, field: str = "group") -> None:
    """Raises InvalidArgument unless `name` may name a consumer group."""
    checks.matches(field, name, _GROUP, _GROUP_RULE)
    if name in HIDDEN_GROUPS:
        raise checks.wrong(field, name, "not the broker's own")


def check_own_group(name: str, field: str = "group") -> None:
    """As `check_group`, and not for the system's own group."""
    check_group(name, field)
    if name == TIMER_GROUP:
        raise checks.wrong(field, name, "not the timer service's own")


def retry_topic(group: str) -> str:
    """What the group sent back and shall get again; its consumers subscribe to it unasked."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """What the group has given up."""
    return DEAD_LETTER_PREFIX + group


def is_retry(topic: str) -> bool:
    """Whether it is some group's retry topic."""
    return topic.startswith(RETRY_PREFIX)


def is_dead_letter(topic: str) -> bool:
    """Whether it is some group's dead-letter topic."""
    return topic.startswith(DEAD_LETTER_PREFIX)


def group_of(topic: str) -> str:
    """The group of a retry or dead-letter topic; empty for any other topic."""
    for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
        if topic.startswith(prefix):
            return topic[len(prefix) :]
    return ""


def is_system(topic: str) -> bool:
    """Whether the topic is the system's own."""
    return SYSTEM_SIGN in topic
