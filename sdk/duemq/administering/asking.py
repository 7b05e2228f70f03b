"""Questions to all brokers: each knows its own part only, so most answers are joined.

A broker that is away is named, never left out in silence: in `Answers.missing`, or by the
PartialAnswer that is raised where an answer has no place for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Generic, TypeVar

from duemq.errors import DuemqError, Internal, MissingBroker, PartialAnswer, Unavailable
from duemq.protocol import checks
from duemq.protocol.route import Broker
from duemq.transport.cluster_client import Client

# For a broker that may be dead, where the others' answers are worth showing without it.
SHOWN_WITHOUT_TIMEOUT_S = 3.0

T = TypeVar("T")
Method = Callable[..., Awaitable[T]]  # of a channel, seconds and, at brokers, metadata
Absent = tuple[type[DuemqError], ...]


@dataclass(frozen=True, slots=True)
class Answers(Generic[T]):
    """What brokers said.  Who refused with one of `absent` is in neither."""

    by_broker: dict[str, T]
    missing: tuple[MissingBroker, ...]


class Asker:
    """Asks brokers."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @property
    def timeout_s(self) -> float:
        """Of a request."""
        return self.client.settings.request_timeout_s

    def brokers(self) -> Sequence[Broker]:
        """The live brokers.  Raises Unavailable if there is none."""
        brokers = self.client.routes.brokers
        if not brokers:
            raise Unavailable("the nameservers know no live broker")
        return brokers

    async def at(self, broker: str, method: Method[T], timeout_s: float | None = None) -> T:
        """One broker's answer; asked again until `timeout_s`.  Raises DuemqErrors."""
        find = self.client.broker
        return await self.client.call(
            lambda: find(broker).address,
            lambda *to: method(*to, metadata=find(broker).meant),
            timeout_s,
        )

    async def each(
        self,
        method: Method[T],
        absent: Absent = (),
        timeout_s: float = SHOWN_WITHOUT_TIMEOUT_S,
    ) -> Answers[T]:
        """The answers of the brokers that are there, after `request_timeout_s` at most.

        Raises what a broker refuses with, other than `absent`.
        """
        methods = {broker.name: method for broker in self.brokers()}
        answers = await self.gather(methods, absent, min(timeout_s, self.timeout_s))
        # One may be lost while it is asked: once, and as the nameservers tell it.
        missing = {each.name: each for each in (*answers.missing, *self.client.missing)}
        return Answers(answers.by_broker, tuple(missing[name] for name in sorted(missing)))

    async def gather(
        self, methods: Mapping[str, Method[T]], absent: Absent, timeout_s: float
    ) -> Answers[T]:
        """As `each`, a method a broker."""
        missing: list[MissingBroker] = []
        answered: dict[str, T] = {}

        async def ask(name: str) -> None:
            try:
                answered[name] = await self.at(name, methods[name], timeout_s)
            except absent:
                return
            except (Unavailable, Internal) as error:
                missing.append(MissingBroker(name, str(error)))

        await asyncio.gather(*map(ask, methods))
        return Answers(
            {name: answered[name] for name in sorted(answered)},
            tuple(sorted(missing, key=lambda each: each.name)),
        )


# By annotation.  Protobuf would not name the argument; other types are checked by each method.
_KINDS = {
    "str": (checks.is_text, "text"),
    "bool": (lambda value: type(value) is bool, "True or False"),
    "int": (lambda value: type(value) is int, "a whole number"),
}


def _typed(method: Callable[..., Any]) -> Callable[..., Any]:
    names, kinds = method.__code__.co_varnames, method.__annotations__

    @wraps(method)
    async def checked(*args: Any, **named: Any) -> Any:
        for name, value in (*zip(names, args, strict=False), *named.items()):
            kind, optional, _ = kinds.get(name, "").partition(" | None")
            if kind in _KINDS and not (optional and value is None):
                fits, words = _KINDS[kind]
                if not fits(value):
                    raise checks.wrong(name, value, words)
        return await method(*args, **named)

    return checked


class Asking:
    """What each part of the admin client stands on; its methods check their arguments' types."""

    def __init_subclass__(cls) -> None:
        for name, method in tuple(vars(cls).items()):
            if iscoroutinefunction(method) and not name.startswith("_"):
                setattr(cls, name, _typed(method))

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asker = Asker(client)


def refuse_missing(
    missing: Sequence[MissingBroker], done: str = "", partial: object = None
) -> None:
    """Raises PartialAnswer if a broker is missing; `done`: what the others have done."""
    if not missing:
        return
    names = ", ".join(each.name for each in missing)
    raise PartialAnswer(
        f"no answer of {names}: {missing[0].error}{done and '; '}{done}",
        missing=missing,
        partial=partial,
        field="broker",
        value=names,
    )
