"""Arguments of the admin client's methods are of the types that their signatures say.

Else protobuf would say it, or a broker, and neither names the argument.  What a method says of them
beyond that, a range say, it checks itself, as it does moments and durations.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, signature
from typing import Any, TypeVar, cast

from duemq.protocol import checks


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


F = TypeVar("F", bound=Callable[..., Any])

# By what signatures say: whether a value is of it, and the words for it.
_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "str": (_is_text, "text"),
    "bool": (lambda value: type(value) is bool, "True or False"),
    "int": (lambda value: isinstance(value, int) and type(value) is not bool, "a whole number"),
    "float": (
        lambda value: isinstance(value, int | float) and type(value) is not bool,
        "a number",
    ),
    "bytes": (lambda value: isinstance(value, bytes), "bytes"),
}


def typed(method: F) -> F:
    """The method, which raises InvalidArgument for an argument of a wrong type."""
    described = signature(method)
    kinds = {
        name: (*_KINDS[kind], bool(optional))
        for name, each in described.parameters.items()
        for kind, optional, _ in [str(each.annotation).partition(" | None")]
        if kind in _KINDS
    }

    def check(*args: Any, **named: Any) -> None:
        given = described.bind(*args, **named).arguments
        for name in kinds.keys() & given.keys():
            is_one, words, optional = kinds[name]
            if not is_one(given[name]) and not (optional and given[name] is None):
                raise checks.wrong(name, given[name], words)

    @wraps(method)
    async def asynchronous(*args: Any, **named: Any) -> Any:
        check(*args, **named)
        return await method(*args, **named)

    @wraps(method)
    async def generating(*args: Any, **named: Any) -> Any:
        check(*args, **named)
        async with aclosing(method(*args, **named)) as items:
            async for each in items:
                yield each

    @wraps(method)
    def plain(*args: Any, **named: Any) -> Any:
        check(*args, **named)
        return method(*args, **named)

    if iscoroutinefunction(method):
        return cast(F, asynchronous)
    return cast(F, generating if isasyncgenfunction(method) else plain)
