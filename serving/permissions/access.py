"""Who calls, and whether they may: looked at with each request, also of streams that stand.

A request's needs (needs.py) are checked before its method sees it.  Of what comes in parts that
fail one by one, batches of sends and queues of pulls, the method itself asks `refusal`.
"""

import inspect
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from duemq.errors import PermissionDenied
from duemq.protocol import checks
from duemq_server.serving.permissions.needs import Needs, needs_of
from duemq_server.serving.permissions.rights import EVERY, Action, Need, Policy

log = logging.getLogger(__name__)

# Between two log lines of refusals.
LOG_INTERVAL_S = 60.0
_NAMES = ("x509_common_name", "x509_subject_alternative_name")
_SAID = {
    Action.SEND: ("topic", "send to topic {}"),
    Action.RECEIVE: ("topic", "receive from topic {}"),
    Action.SEE: ("topic", "send to or receive from topic {}"),
    Action.JOIN: ("group", "consume in group {}"),
    Action.SCHEDULE: ("name", "use schedule {}"),
    Action.KNOW: ("", "do anything"),
    Action.ADMINISTER: ("", "administer"),
    Action.SERVE: ("", "be a part of the cluster"),
}
# Of a request that asks for nothing.
LEAST: tuple[Need, ...] = (Need(Action.KNOW),)
_WHY_EVERY = ": what is named by a handle, or not at all, needs the right for all"


class Access:
    """Of one call: the names of its caller, and what these may do now."""

    __slots__ = ("_names", "_permissions")

    def __init__(self, permissions: "Permissions", context: Any) -> None:
        found = context.auth_context()
        self._names = tuple(
            dict.fromkeys(
                name.decode("utf-8", "replace")
                for kind in _NAMES
                for name in found.get(kind, ())
                if name  # a common name that is not there is an empty one
            )
        )
        self._permissions = permissions

    def refusal(self, need: Need) -> PermissionDenied | None:
        """Why they may not do it; None: they may."""
        if self._permissions.policy().allows(self._names, need):
            return None
        field, what = _SAID[need.action]
        name, why = ("*", _WHY_EVERY) if need.name == EVERY else (_shown(need.name), "")
        who = _shown(self._names[0]) if self._names else "a certificate without names"
        error = PermissionDenied(
            f"permissions: {who} may not {what.format(name)}{why}", field=field, value=name
        )
        self._permissions.tell(error)
        return error

    def check(self, needs: Iterable[Need]) -> None:
        """Raises PermissionDenied."""
        for need in needs:
            error = self.refusal(need)
            if error is not None:
                raise error


ACCESS: ContextVar[Access | None] = ContextVar("ACCESS", default=None)
"""Of the call that this task belongs to; None: everybody may do everything."""


class Permissions:
    """Around the methods of a server.  Used from one event loop."""

    def __init__(self, policy: Callable[[], Policy]) -> None:
        """`policy`: that of now."""
        self.policy = policy
        self._quiet_until_s = 0.0
        self._untold = 0

    def tell(self, error: PermissionDenied) -> None:
        """Logs a refusal, once a minute at most: whoever can cause one can cause thousands."""
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            self._untold += 1
            return
        self._quiet_until_s = now_s + LOG_INTERVAL_S
        log.warning("refused: %s (and %d since the last line)", error, self._untold)
        self._untold = 0

    def around(self, behaviour: Any, path: str, *, requests: bool) -> Any:
        """The same method, for those who may; `requests`: it takes a stream of them.

        Raises LookupError for a method whose needs nobody has said.
        """
        needs = needs_of(path)

        def admitted(request: Any, context: Any) -> Any:
            access = Access(self, context)
            ACCESS.set(access)
            if requests:
                return _each(request, access, needs)
            access.check(_needed(needs, request, LEAST))
            return request

        async def call(request: Any, context: Any) -> Any:
            return await behaviour(admitted(request, context), context)

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            async with aclosing(behaviour(admitted(request, context), context)) as found:
                async for answer in found:
                    if not requests:  # which may have been asked for long ago
                        admitted(request, context)
                    yield answer

        return generate if inspect.isasyncgenfunction(behaviour) else call


def _needed(needs: Needs, request: Any, least: tuple[Need, ...]) -> tuple[Need, ...]:
    found = needs(request)
    return () if found is None else tuple(found) or least


def _shown(name: str) -> str:
    """As it may stand in a line of the log."""
    name = name[: checks.SHOWN_CHARACTERS_MAX]
    return name if name.isprintable() else ascii(name)


async def _each(requests: AsyncIterable[Any], access: Access, needs: Needs) -> AsyncIterator[Any]:
    """What has no needs of its own, as a member's heartbeat, has those of what came before it."""
    last = LEAST
    async for request in requests:
        last = _needed(needs, request, last)
        access.check(last)
        yield request
