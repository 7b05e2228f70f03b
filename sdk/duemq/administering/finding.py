"""Messages looked up at all brokers: step by step at each, side by side, until a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import NamedTuple

from duemq.administering.asking import Asker
from duemq.administering.letters.resending import Letter
from duemq.errors import (
    Internal,
    MissingBroker,
    QueueNotFound,
    TopicNotFound,
    Unavailable,
)
from duemq.message import Message, Origin
from duemq.protocol import checks, message_ids
from duemq.protocol.limits import FOUND_MAX
from duemq.protocol.moments import Moment, span_ms
from duemq.protocol.names import is_dead_letter, is_system
from duemq.v1 import message_admin_pb2, stubs

LOOKUP_TIMEOUT_S = 60.0
"""Of a look-up at all brokers; it may have to read whole logs."""
# A message is stored soon after its id was made, by clocks that differ little: so long before and
# after that it is looked for first.
STORED_BEFORE_MS = 60_000
STORED_AFTER_MS = 600_000
# An id that is of a later moment than this from now on has no time in it.
CLOCKS_APART_MS_MAX = 3_600_000


def request_of(
    topic: str,
    *,
    message_id: str | None,
    key: str | None,
    since: Moment | None,
    until: Moment | None,
) -> message_admin_pb2.FindMessagesRequest:
    """What is looked for; None: no matter.

    Raises InvalidArgument for a message id or key that is empty (on the wire that would be all
    messages), for both of them, for what is no moment, and for a range of time with nothing in it.
    """
    for field, value in (("message_id", message_id), ("key", key)):
        if value is not None:  # empty it would be all of them
            checks.filled(field, value)
    checks.at_most_one(message_id=message_id, key=key)
    from_ms, to_ms = span_ms(since, until, time.time_ns() // 1_000_000)
    if to_ms is not None and to_ms <= from_ms:
        raise checks.wrong("until", until, f"after {since or 1970}: nothing lies between")
    return message_admin_pb2.FindMessagesRequest(
        topic=topic, message_id=message_id, key=key, from_ms=from_ms, to_ms=to_ms
    )


class SearchAnswer(NamedTuple):
    """`more`: at the limit.  `missing`: brokers that did not answer, or not to the end."""

    messages: list[Message]
    more: bool
    missing: list[MissingBroker]
    served: bool
    """Some broker has the topic (and queue)."""


async def messages_at(
    asker: Asker,
    broker: str,
    request: message_admin_pb2.FindMessagesRequest,
    deadline: float,
) -> AsyncGenerator[Message, None]:
    """All that one broker finds, in the order queue, offset.

    `deadline` is in time.monotonic's seconds: raises Unavailable then, and what the broker refuses
    with.
    """
    step = message_admin_pb2.FindMessagesRequest()
    step.CopyFrom(request)
    while True:
        answer = await asker.at(
            broker,
            stubs.MessageAdminStub.ask("FindMessages", step),
            max(0.001, min(asker.timeout_s, deadline - time.monotonic())),
        )
        for found in answer.messages:
            yield message_of(found)
        if not answer.cursor:
            return
        step.cursor = answer.cursor
        if time.monotonic() >= deadline:
            raise Unavailable(f"the look-up at {broker} was not through in time: narrow its range")


def message_of(found: message_admin_pb2.FoundMessage) -> Message:
    """As consumers get it."""
    origin = Origin(found.queue.topic, found.queue.broker, found.queue.queue_id)
    if is_dead_letter(found.queue.topic):
        return Letter(found.record, origin, found.offset, found.store_ms, found.resent)
    return Message(found.record, origin, found.offset, found.store_ms)


async def find(
    asker: Asker,
    request: message_admin_pb2.FindMessagesRequest,
    limit: int,
    *,
    brokers: list[str] | None = None,
    timeout_s: float = LOOKUP_TIMEOUT_S,
) -> SearchAnswer:
    """Up to `limit` messages of all brokers, or of `brokers`, by store time.

    A message id of the SDK is looked for in the minutes that it names, and, if it is not there, in
    all of the range.  A broker without the topic or queue finds nothing.  Raises what a broker
    refuses with.
    """
    deadline = time.monotonic() + timeout_s
    away: list[MissingBroker] = []
    if brokers is None:
        away = list(asker.client.missing)
        brokers = [broker.name for broker in asker.brokers()]
    served = False
    for narrowed in _ranges(request, time.time_ns() // 1_000_000):
        found = await _find(asker, narrowed, limit, brokers, deadline)
        served |= found.served
        away += found.missing
        if found.messages:
            break
        silent = {missing.name for missing in found.missing}
        brokers = [broker for broker in brokers if broker not in silent]
    away.sort(key=lambda each: each.name)
    return found._replace(missing=away, served=served)


def _ranges(
    request: message_admin_pb2.FindMessagesRequest, now_ms: int
) -> list[message_admin_pb2.FindMessagesRequest]:
    """The request as it is; before it, one for the minutes in which its message id was made.

    Topics of the system hold copies of a message, made long after it: all of them are wanted.
    """
    begun_ms = message_ids.begun_ms(request.message_id)
    if begun_ms is None or begun_ms > now_ms + CLOCKS_APART_MS_MAX or is_system(request.topic):
        return [request]
    near = message_admin_pb2.FindMessagesRequest()
    near.CopyFrom(request)
    near.from_ms = max(request.from_ms, begun_ms - STORED_BEFORE_MS)
    near.to_ms = min(request.to_ms or begun_ms + STORED_AFTER_MS, begun_ms + STORED_AFTER_MS)
    return [near, request] if 0 < near.from_ms < near.to_ms else [request]


async def _find(
    asker: Asker,
    request: message_admin_pb2.FindMessagesRequest,
    limit: int,
    brokers: list[str],
    deadline: float,
) -> SearchAnswer:
    step = message_admin_pb2.FindMessagesRequest()
    step.CopyFrom(request)
    # One more than wanted tells whether there are more.
    step.limit = min(limit + 1, FOUND_MAX)
    missing: list[MissingBroker] = []
    gathered: list[Message] = []
    served = False

    async def at(broker: str) -> None:
        nonlocal served
        count = 0
        try:
            async for message in messages_at(asker, broker, step, deadline):
                gathered.append(message)
                count += 1
                if count > limit:
                    break
        except (TopicNotFound, QueueNotFound):
            return
        except (Unavailable, Internal) as error:
            missing.append(MissingBroker(broker, str(error)))
        served = True

    await asyncio.gather(*map(at, brokers))
    gathered.sort(key=lambda each: (each.store_ms, each.broker, each.queue, each.offset))
    return SearchAnswer(gathered[:limit], len(gathered) > limit, missing, served)
