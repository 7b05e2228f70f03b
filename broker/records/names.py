"""Names of topics and groups: what is legal and what belongs to the system.  Pure."""

import re

from duemq.errors import InvalidArgument
from duemq.protocol import names

TOPIC_CHARACTERS_MAX = 127
GROUP_CHARACTERS_MAX = 127

TIMER_TOPIC = "%TIMER%"
TIMER_GROUP = "%TIMER%"
# Its offset in a queue: what lies before was purged.
PURGED_GROUP = "%PURGED%"
# What it has in a dead-letter queue was sent again.
RESENT_GROUP = "%RESENT%"
# They keep state of the broker; nobody else reads or writes it by their names.
HIDDEN_GROUPS = frozenset((PURGED_GROUP, RESENT_GROUP))
RETRY_PREFIX = names.retry_topic("")
DEAD_LETTER_PREFIX = names.dead_letter_topic("")

_GROUP = re.compile(r"[A-Za-z0-9_%|-]{1,127}\Z")
_RULE = "1 to 127 of [A-Za-z0-9_%|-]"
_TOPIC = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.%|-]{1,127}\Z")
_TOPIC_RULE = "1 to 127 of [A-Za-z0-9_.|-], and neither . nor .."
# The system's own topics.  Those of groups may be longer: the prefix comes before a group's name.
_SYSTEM_TOPIC = re.compile(r"(%TIMER%|%TRACE%|(%RETRY%|%DLQ%)[A-Za-z0-9_%|-]{1,127})\Z")


def check_topic(name: str) -> None:
    """Raises InvalidArgument unless `name` may name a topic."""
    if _SYSTEM_TOPIC.match(name):
        return
    if not _TOPIC.match(name):
        raise InvalidArgument(
            f"topic: {name[:200]!r} is not a legal name: {_TOPIC_RULE}",
            field="topic",
            value=name[:200],
            limit=_TOPIC_RULE,
        )
    if "%" in name:
        raise InvalidArgument(
            f"topic: {name!r}: names with % belong to the system",
            field="topic",
            value=name,
            limit="no % but in %TRACE%, %RETRY%<group>, %DLQ%<group>",
        )


def check_group(name: str, field: str = "group") -> None:
    """Raises InvalidArgument unless `name` may name a consumer group."""
    if not _GROUP.match(name) or name in HIDDEN_GROUPS:
        raise InvalidArgument(
            f"{field}: {name[:200]!r} is not a legal name: {_RULE}",
            field=field,
            value=name[:200],
            limit=_RULE,
        )


def check_own_group(name: str, field: str = "group") -> None:
    """As `check_group`, and not for the system's own group."""
    check_group(name, field)
    if name == TIMER_GROUP:
        raise InvalidArgument(
            f"{field}: {name} is the timer service's own",
            field=field,
            value=name,
            limit="not %TIMER%",
        )


def retry_topic(group: str) -> str:
    """Where what a group sent back waits to be delivered again."""
    return names.retry_topic(group)


def dead_letter_topic(group: str) -> str:
    """Where what a group could not process stays."""
    return names.dead_letter_topic(group)


def is_retry(topic: str) -> bool:
    """Whether it is some group's retry topic."""
    return topic.startswith(RETRY_PREFIX)


def group_of(topic: str) -> str:
    """The group of a retry or dead-letter topic; empty for any other topic."""
    for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
        if topic.startswith(prefix):
            return topic[len(prefix) :]
    return ""


def is_system(topic: str) -> bool:
    """Whether the topic is the system's own."""
    return "%" in topic
