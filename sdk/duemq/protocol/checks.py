"""Checks of what a caller gave.  Pure.

All raise InvalidArgument, which names the field, the value and what is allowed.
"""

import re
from collections.abc import Collection
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction

from duemq.errors import InvalidArgument

SHOWN_CHARACTERS_MAX = 200
"""Of a value, in an error."""


def wrong(field: str, value: object, limit: object) -> InvalidArgument:
    """The error of a value that is not allowed; `limit` says what is."""
    shown = str(value)[:SHOWN_CHARACTERS_MAX]
    text = repr(shown) if isinstance(value, str) else repr(value)[:SHOWN_CHARACTERS_MAX]
    return InvalidArgument(
        f"{field}: {text} is not allowed: {limit}", field=field, value=shown, limit=limit
    )


def between(field: str, value: float, low: float, high: float, *, zero: str = "") -> None:
    """From `low` to `high`; with `zero`, which says what 0 stands for, 0 as well."""
    if not low <= value <= high and not (zero and value == 0):
        raise wrong(field, value, f"{low} to {high}" + (f", or 0 for {zero}" if zero else ""))


def at_least(field: str, value: float, low: float) -> None:
    """`low` or more."""
    if not value >= low:
        raise wrong(field, value, f"at least {low}")


def at_most(field: str, value: float, high: float) -> None:
    """`high` or less."""
    if not value <= high:
        raise wrong(field, value, f"at most {high}")


def above(field: str, value: float, low: float) -> None:
    """More than `low`."""
    if not value > low:
        raise wrong(field, value, f"above {low}")


def whole(field: str, value: object, low: int, high: int) -> None:
    """A whole number from `low` to `high`; True and 1.0 are none."""
    if type(value) is not int or not low <= value <= high:
        raise wrong(field, value, f"a whole number, {low:,} to {high:,}")


def number(field: str, value: object, low: float, high: float) -> None:
    """A number from `low` to `high`; True is none."""
    if not (type(value) is int or type(value) is float) or not low <= value <= high:
        raise wrong(field, value, f"{low:g} to {high:g}")


def flag(field: str, value: object) -> None:
    """True or False; what only counts as one of them is none."""
    if type(value) is not bool:
        raise wrong(field, value, "True or False")


def instance(field: str, value: object, kind: type) -> None:
    """Of that class."""
    if not isinstance(value, kind):
        raise wrong(field, value, f"a {kind.__name__}")


def plain_function(field: str, value: object, arguments: str) -> None:
    """What runs when it is called."""
    kinds = iscoroutinefunction, isgeneratorfunction, isasyncgenfunction
    if not callable(value) or any(
        kind(each) for kind in kinds for each in (value, type(value).__call__)
    ):
        raise wrong(field, value, f"a plain function of {arguments}")


def count(field: str, found: int, low: int, high: int, what: str = "of them") -> None:
    """How many there are; `what` is in the error: `handles: 20000 in a request, at most …`."""
    if not low <= found <= high:
        limit = f"{low} to {high}" if low else f"at most {high}"
        raise InvalidArgument(
            f"{field}: {found} {what}, {limit} are allowed", field=field, value=found, limit=limit
        )


def length(field: str, text: str, low: int, high: int) -> None:
    """How many characters a text has."""
    count(field, len(text), low, high, "characters")


def is_text(value: object) -> bool:
    """Text that UTF-8 has: no half of a surrogate pair."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def filled(field: str, text: object) -> None:
    """A text that is not empty."""
    if not is_text(text) or not text:
        raise wrong(field, text, "text that is not empty")


def matches(field: str, text: object, pattern: re.Pattern[str], limit: str) -> None:
    """A text that the pattern is of as a whole; `limit` says so in words."""
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise wrong(field, text, limit)


def one_of(field: str, value: object, choices: Collection[str]) -> None:
    """One of the choices."""
    if value not in choices:
        raise wrong(field, value, f"one of {', '.join(choices)}")


def at_most_one(**given: object) -> None:
    """Of the arguments, all but one are None, or all."""
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidArgument(
            f"{' and '.join(named)} exclude each other",
            field=named[-1],
            value=given[named[-1]],
            limit=f"one of {', '.join(given)}",
        )
