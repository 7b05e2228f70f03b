"""Names of topics and groups: what is legal and what belongs to the system.  Pure."""

import re

from duemq.errors import InvalidArgument

TOPIC_CHARACTERS_MAX = 127
GROUP_CHARACTERS_MAX = 127

TIMER_TOPIC = "%TIMER%"
TIMER_GROUP = "%TIMER%"

_NAME = re.compile(r"[A-Za-z0-9_%|-]{1,127}\Z")
_RULE = "1 to 127 of [A-Za-z0-9_%|-]"
# The system's own topics; %RETRY% and %DLQ% are followed by a group's name.
_SYSTEM_TOPIC = re.compile(r"(%TIMER%|%TRACE%|%RETRY%[^%]+|%DLQ%[^%]+)\Z")


def check_topic(name: str) -> None:
    """Raises InvalidArgument unless `name` may name a topic."""
    if not _NAME.match(name):
        raise InvalidArgument(
            f"topic: {name[:200]!r} is not a legal name: {_RULE}",
            field="topic",
            value=name[:200],
            limit=_RULE,
        )
    if "%" in name and not _SYSTEM_TOPIC.match(name):
        raise InvalidArgument(
            f"topic: {name!r}: names with % belong to the system",
            field="topic",
            value=name,
            limit="no % but in %TRACE%, %RETRY%<group>, %DLQ%<group>",
        )


def check_group(name: str) -> None:
    """Raises InvalidArgument unless `name` may name a consumer group."""
    if not _NAME.match(name):
        raise InvalidArgument(
            f"group: {name[:200]!r} is not a legal name: {_RULE}",
            field="group",
            value=name[:200],
            limit=_RULE,
        )


def is_system(topic: str) -> bool:
    """Whether the topic is the system's own."""
    return "%" in topic
