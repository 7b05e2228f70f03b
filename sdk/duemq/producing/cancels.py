"""Cancelling of delayed messages: each handle goes to the timer shard that keeps its message."""

import asyncio
import enum
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import overload

from duemq.errors import DuemqError
from duemq.producing import handle as handles
from duemq.producing.keyed import asks
from duemq.producing.keyed.asks import Ref, TimerAsker, TimerKey, keys_of
from duemq.protocol import checks
from duemq.protocol.limits import HANDLES_MAX
from duemq.sent import Receipt
from duemq.transport import retrying, status
from duemq.transport.cluster_client import Client
from duemq.v1 import timer_pb2
from duemq.v1.message_pb2 import TimerHandle


class CancelOutcome(enum.StrEnum):
    """What became of a `cancel`."""

    CANCELLED = "cancelled"
    """It will never be delivered; one that was rescheduled has another handle, and will be."""
    FIRED = "fired"
    """Too late: it is delivered or on its way."""
    UNKNOWN = "unknown"
    """Its shard never had it and will not get it, or it is gone for longer than `cancel_memory`."""


_OUTCOMES = {
    timer_pb2.CANCELLED: CancelOutcome.CANCELLED,
    timer_pb2.FIRED: CancelOutcome.FIRED,
}


Handle = str | Receipt
"""What tells a delayed message: its handle, or its receipt, which has one."""
Handles = Sequence[Handle]


class Cancelling(TimerAsker):
    """What the asyncio producer and the admin client have in common."""

    @overload
    async def cancel(self, handle: Handle) -> CancelOutcome: ...  # type: ignore[overload-overlap]
    @overload
    async def cancel(self, handle: Handles) -> list[CancelOutcome]: ...
    @overload
    async def cancel(self, *, key: TimerKey) -> CancelOutcome: ...
    @overload
    async def cancel(self, *, key: Sequence[TimerKey]) -> list[CancelOutcome]: ...
    async def cancel(
        self,
        handle: Handle | Handles | None = None,
        *,
        key: TimerKey | Sequence[TimerKey] | None = None,
    ) -> CancelOutcome | list[CancelOutcome]:
        """Cancels delayed messages: by their receipts, or the handles of these; one, or a list.

        Or by `key`: (topic, timer_key), or a list of such pairs.

        What is answered CANCELLED is never delivered.  By handle it may be repeated; by key a
        repeat cancels what waits under the key by then, or answers what became of the last one,
        as far as its shard remembers.  Raises InvalidArgument for what is not a handle or key,
        Unavailable when a timer shard cannot be asked in time: it may have cancelled all the same.
        Of a list the error's `answers` say which were.
        """
        if key is not None:
            checks.at_most_one(handle=handle, key=key)
            keys, single = keys_of(key)
            outcomes = await self._cancel_keys(keys)
            return outcomes[0] if single else outcomes
        if isinstance(handle, Handle):
            return (await self._cancel([handle]))[0]
        return await self._cancel(handle)  # type: ignore[arg-type]  # None is refused there

    async def _cancel(self, handles: Handles) -> list[CancelOutcome]:
        calls = self._timer_calls_now()
        return await cancel(calls.client, handles, calls.timeout_s)

    async def _cancel_keys(self, keys: Sequence[TimerKey]) -> list[CancelOutcome]:
        return await asks.ask(self._timer_calls_now(), asks.CancelCall, _outcome, keys)


def _outcome(result: timer_pb2.CancelResult) -> CancelOutcome:
    return _OUTCOMES.get(result.outcome, CancelOutcome.UNKNOWN)


def decoded_all(given: object) -> list[TimerHandle]:
    """Raises InvalidArgument for what is no list of handles, and for a receipt that has none."""
    if isinstance(given, list | tuple):
        given = [_text(each) for each in given]
    return handles.decode_all(given)


def refs_of(
    handle: Handle | Handles | None, key: TimerKey | Sequence[TimerKey] | None
) -> tuple[Sequence[Ref], bool]:
    """What is meant, and whether it was one and no list.  Raises InvalidArgument."""
    if key is not None:
        checks.at_most_one(handle=handle, key=key)
        return keys_of(key)
    single = isinstance(handle, Handle)
    return decoded_all([handle] if single else handle), single


def _text(handle: object) -> object:
    if not isinstance(handle, Receipt):
        return handle
    if handle.handle is None:
        raise checks.wrong(
            "handle", handle.message_id, "a delayed message: this one was not delayed"
        )
    return handle.handle


async def cancel(client: Client, given: Sequence[Handle], timeout_s: float) -> list[CancelOutcome]:
    """Cancels the messages of these handles; the outcomes in the same order.

    A shard that is away or has not received the message yet is asked again until `timeout_s`.
    Raises InvalidArgument for what is not a handle, before anything is cancelled; Unavailable
    when some could not be asked for: their outcome is unknown, and asking again does no harm; the
    others' are in its `answers`.
    """
    wanted = decoded_all(given)
    outcomes: dict[int, CancelOutcome] = {}
    deadline = time.monotonic() + timeout_s
    trials = itertools.count()

    async def attempt(left_s: float) -> None:
        first = next(trials) == 0
        by_shard: defaultdict[str, list[int]] = defaultdict(list)
        away: DuemqError | None = None
        for index, handle in enumerate(wanted):
            if index not in outcomes:
                try:
                    by_shard[client.timer_of(handle.queue_id).address].append(index)
                except DuemqError as error:  # the others' are cancelled all the same
                    away = error
        parts = [
            (address, wanted, indexes[start : start + HANDLES_MAX])
            for address, indexes in by_shard.items()
            for start in range(0, len(indexes), HANDLES_MAX)
        ]
        asked = [_ask(client, *part, outcomes, left_s, first) for part in parts]
        if len(asked) == 1 and away is None:  # no task of its own: it takes turns of the event loop
            await asked[0]
            return
        retrying.raise_one_of([away, *await asyncio.gather(*asked, return_exceptions=True)])

    try:
        await retrying.until(deadline, attempt, client.settings.away_timeout_s)
    except DuemqError as error:
        raise asks.with_answers(error, outcomes) from error
    return [outcomes[index] for index in range(len(wanted))]


async def _ask(
    client: Client,
    address: str,
    wanted: Sequence[TimerHandle],
    indexes: Sequence[int],
    outcomes: dict[int, CancelOutcome],
    left_s: float,
    may_share: bool,
) -> None:
    asked = [wanted[index] for index in indexes]
    results = await client.cancel_calls.ask(address, asked, left_s, may_share=may_share)
    error: DuemqError | None = None
    for index, result in zip(indexes, results, strict=True):
        if result.HasField("error"):
            error = status.from_proto(result.error)
        else:
            outcomes[index] = _outcome(result)
    if error is not None:
        raise error
