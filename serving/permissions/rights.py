"""What a file of permissions says.  Pure.

    [[allow]]
    names = ["billing.example.org"]
    send = ["invoices", "audit.*"]
    receive = ["orders"]
    groups = ["billing*"]

Each entry gives rights to names of certificates; who has several names, or is in several entries,
has the rights of all.  A name that no entry has may do nothing.
"""

import enum
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.protocol.names import SYSTEM_SIGN, group_of

EVERYBODY = "*"
# Answers that are kept; made-up names of topics take the place of others.
ANSWERS_MAX = 10_000
# Nothing has a longer name; who makes one up may send megabytes of it.
KEPT_CHARACTERS_MAX = 256
FIELD = "permissions"


class Action(enum.StrEnum):
    """What is done to what a Need names."""

    SEND = "send"
    """To a topic."""
    RECEIVE = "receive"
    """From a topic."""
    SEE = "see"
    """What a topic is like: for who may send to it or receive from it."""
    JOIN = "join"
    """A group: as a member, or with its offsets."""
    SCHEDULE = "schedule"
    """A schedule of recurring messages: made, changed, looked at."""
    KNOW = "know"
    """What all may who have any rights: routes, names, how the cluster is."""
    ADMINISTER = "administer"
    SERVE = "serve"
    """As a part of the cluster."""


class Need(NamedTuple):
    """A right that a request needs."""

    action: Action
    name: str = ""
    """Of the topic, group or schedule; EVERY: each of them."""


EVERY = "\0"
"""No name is so: only the pattern `*` and administrators have it."""


@dataclass(frozen=True, slots=True)
class AllowRule:
    """One `[[allow]]`."""

    names: tuple[str, ...]
    send: tuple[str, ...] = ()
    receive: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    admin: bool = False
    service: bool = False

    def has_any(self, names: tuple[str, ...]) -> bool:
        """Whether it is of a certificate with these names."""
        return any(name in self.names or EVERYBODY in self.names for name in names)

    def allows(self, need: Need) -> bool:
        """Whether it gives this right."""
        if self.service or (self.admin and need.action is not Action.SERVE):
            return True
        return _ALLOWED[need.action](self, need.name)


class Policy:
    """All entries, and what was asked of them: each request asks."""

    def __init__(self, entries: Collection[AllowRule]) -> None:
        self.entries = tuple(entries)
        self._answers: dict[tuple[tuple[str, ...], Need], bool] = {}

    def allows(self, names: tuple[str, ...], need: Need) -> bool:
        """Whether who has these names may do it."""
        answer = self._answers.get((names, need))
        if answer is None:
            answer = any(entry.allows(need) for entry in self.entries if entry.has_any(names))
            if len(self._answers) >= ANSWERS_MAX:
                self._answers.clear()
            if len(need.name) <= KEPT_CHARACTERS_MAX:
                self._answers[names, need] = answer
        return answer


def _matches(patterns: Iterable[str], name: str) -> bool:
    """A pattern is a name, or how names begin, with `*` behind it.

    `*` alone is none of the system's: those are named with their `%`.
    """
    return any(
        pattern == name
        or (pattern == "*" and not name.startswith(SYSTEM_SIGN))
        or (len(pattern) > 1 and pattern[-1] == "*" and name.startswith(pattern[:-1]))
        for pattern in patterns
    )


def _may_send(entry: AllowRule, topic: str) -> bool:
    return _matches(entry.send, topic)


def _may_receive(entry: AllowRule, topic: str) -> bool:
    group = group_of(topic)  # of what it sent back
    return _matches(entry.receive, topic) or bool(group and _matches(entry.groups, group))


_ALLOWED = {
    Action.SEND: _may_send,
    Action.RECEIVE: _may_receive,
    Action.SEE: lambda entry, topic: _may_send(entry, topic) or _may_receive(entry, topic),
    Action.JOIN: lambda entry, group: _matches(entry.groups, group),
    Action.SCHEDULE: lambda entry, name: _matches(entry.schedules, name),
    Action.KNOW: lambda *_: True,
    Action.ADMINISTER: lambda *_: False,
    Action.SERVE: lambda *_: False,
}


def parse(text: str) -> Policy:
    """Of the file's text.  Raises InvalidArgument that names what is wrong."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{FIELD}: {error}", field=FIELD) from None
    unknown = set(content) - {"allow"}
    if unknown:
        raise checks.wrong(FIELD, min(unknown), "[[allow]] entries, and nothing else")
    tables = content.get("allow", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise checks.wrong(FIELD, tables, "[[allow]] entries, with two brackets")
    entries = tuple(_entry(number, table) for number, table in enumerate(tables, 1))
    if not any(entry.service for entry in entries):
        raise checks.wrong(
            f"{FIELD}: service", "", "true in one entry, or the cluster has no parts"
        )
    return Policy(entries)


def _entry(number: int, table: Mapping[str, Any]) -> AllowRule:
    where = f"{FIELD}: entry {number}"
    known = {each.name for each in fields(AllowRule)}
    for name in table:
        if name not in known:
            raise checks.wrong(where, name, f"one of {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name in ("admin", "service"):
            if not isinstance(value, bool):
                raise checks.wrong(f"{where}: {name}", value, "true or false")
            values[name] = value
        else:
            values[name] = _texts(f"{where}: {name}", value)
    if not values.get("names"):
        raise checks.wrong(f"{where}: names", "", "at least one name of certificates, or *")
    if EVERYBODY in values["names"] and (values.get("admin") or values.get("service")):
        raise checks.wrong(f"{where}: names", EVERYBODY, "names, where all is allowed")
    return AllowRule(**values)


def _texts(where: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise checks.wrong(where, value, "a list of texts")
    for each in value:
        if where.endswith(": names"):
            if "*" in each and each != EVERYBODY:
                raise checks.wrong(where, each, "a whole name of certificates, or * alone")
        elif "*" in each[:-1]:
            raise checks.wrong(where, each, "a name, or how names begin and one * at the end")
    return tuple(value)
