"""What is pending of a topic, cancelled, shifted or moved: a job at each timer shard."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta

from duemq.administering.asking import refuse_missing
from duemq.administering.timer_shards import shard_name
from duemq.administering.timers import Timers
from duemq.errors import DuemqError, InvalidArgument, MissingBroker, TopicNotFound
from duemq.protocol import checks, moments, timer_keys
from duemq.protocol.due import DUE_MS_MAX, delay_ms
from duemq.protocol.moments import Moment
from duemq.protocol.route import TimerShard
from duemq.transport import retrying, status
from duemq.v1 import stubs, timer_pb2

WAIT_S = 10.0  # for an answer of a shard, which answers every 2 s how far it is
AWAY_S = 30.0  # that a shard may be, while its job waits: another replica takes over sooner
JOB_TIMEOUT_S = 3_600.0


class PendingTimers(Timers):
    """What the admin client asks timer shards to do to many timers."""

    async def cancel_pending(
        self,
        topic: str,
        *,
        key_prefix: str = "",
        since: Moment | None = None,
        until: Moment | None = None,
        dry_run: bool = False,
        request_id: bytes | None = None,
    ) -> int:
        """Cancels a topic's pending messages; how many.

        Of a `timer_key` that begins with `key_prefix`; due at `since` or later, and before `until`.
        A job at each timer shard, that goes on there whatever becomes of the caller: only what was
        pending when it began is touched.  `dry_run` changes nothing and answers how many it would
        be.  With a `request_id` of your own (16 random bytes) another call continues the same job,
        for a day; without one each call is a new one.

        Raises InvalidArgument; PartialAnswer, whose `partial` is the number of the others, if a
        shard is away, or cannot read a part of its files; it names them.
        """
        change = timer_pb2.ChangePendingRequest(cancel=True)
        return await self._change(
            change, topic, key_prefix, since, until, dry_run=dry_run, request_id=request_id
        )

    async def shift_pending(
        self,
        topic: str,
        by: float | timedelta | str,
        *,
        key_prefix: str = "",
        since: Moment | None = None,
        until: Moment | None = None,
        dry_run: bool = False,
        request_id: bytes | None = None,
    ) -> int:
        """Makes a topic's pending messages due so much later; below zero: sooner.  How many.

        `by`: seconds, a timedelta, or text as 1h30m, -5m.  What would be due by now is due at once.
        Each message has a new handle then; a cancel by the old one answers CANCELLED.  Else as
        `cancel_pending`: no message is shifted twice.  But another call, without the first one's
        `request_id`, shifts all once more: give one, to go on with after a PartialAnswer.
        """
        change = timer_pb2.ChangePendingRequest(shift_ms=shift_ms_of(by))
        return await self._change(
            change, topic, key_prefix, since, until, dry_run=dry_run, request_id=request_id
        )

    async def move_pending(
        self,
        topic: str,
        to_topic: str,
        *,
        since: Moment | None = None,
        until: Moment | None = None,
        dry_run: bool = False,
        request_id: bytes | None = None,
    ) -> int:
        """Makes a topic's pending messages go to another one when they are due; how many.

        Say because the topic was deleted: they would wait for ever.  Those with a `timer_key` stay:
        send these anew.  Else as `shift_pending`.  Raises TopicNotFound too, for `to_topic`.
        """
        timer_keys.check_move(topic, to_topic)
        change = timer_pb2.ChangePendingRequest(to_topic=to_topic)
        return await self._change(
            change, topic, "", since, until, dry_run=dry_run, request_id=request_id
        )

    async def _change(
        self,
        request: timer_pb2.ChangePendingRequest,
        topic: str,
        key_prefix: str,
        since: Moment | None,
        until: Moment | None,
        *,
        dry_run: bool,
        request_id: bytes | None,
    ) -> int:
        timer_keys.check_selection(topic, key_prefix)
        request.topic, request.key_prefix, request.dry_run = topic, key_prefix, dry_run
        request.from_ms, to_ms = moments.span_ms(since, until, time.time_ns() // 1_000_000)
        request.to_ms = 0 if to_ms is None else max(1, to_ms)
        if until is not None and request.to_ms <= request.from_ms:
            raise checks.wrong("until", str(until), f"after since, {since}")
        if not dry_run:
            request.request_id = _request_id(request_id)
        alive, missing = self._shards(), list[MissingBroker]()
        jobs = (self._job(each, request, missing) for each in alive)
        count = sum(await asyncio.gather(*jobs))
        missing += await self._lost(alive)
        refuse_missing(sorted(missing, key=lambda each: each.name), partial=count)
        return count

    async def _job(
        self,
        shard: TimerShard,
        request: timer_pb2.ChangePendingRequest,
        missing: list[MissingBroker],
    ) -> int:
        """One shard's, until it is over; how many it touched."""
        count, deadline = 0, time.monotonic() + JOB_TIMEOUT_S
        name = shard_name(shard)
        try:
            while time.monotonic() < deadline:
                answer = await self._progress(shard, request)
                count = answer.count
                if answer.over:
                    if answer.HasField("error"):
                        error = status.from_proto(answer.error)
                        missing.append(MissingBroker(name, str(error)))
                    return count
            what = "waits for another one" if answer.waits else "goes on there"
            missing.append(MissingBroker(name, f"the job {what} after {JOB_TIMEOUT_S:g} s"))
        except (InvalidArgument, TopicNotFound):
            raise
        except DuemqError as error:
            missing.append(MissingBroker(name, str(error)))
        return count

    async def _progress(
        self, shard: TimerShard, request: timer_pb2.ChangePendingRequest
    ) -> timer_pb2.ChangePendingResponse:
        """Asked again while the shard has no leader, say; a dry run may take as long as a job."""
        allowed_s = self._asker.timeout_s if request.dry_run else AWAY_S
        timeout_s = JOB_TIMEOUT_S if request.dry_run else WAIT_S
        change = stubs.TimerStub.ask("ChangePending", request)

        async def attempt(left_s: float) -> timer_pb2.ChangePendingResponse:
            return await self._client.once(self._address_of(shard), change, timeout_s)

        return await retrying.until(time.monotonic() + allowed_s, attempt)


def _request_id(given: bytes | None) -> bytes:
    if given is None:
        return os.urandom(timer_keys.REQUEST_ID_BYTES)
    if type(given) is not bytes or len(given) != timer_keys.REQUEST_ID_BYTES or not any(given):
        raise checks.wrong("request_id", given, f"{timer_keys.REQUEST_ID_BYTES} random bytes")
    return given


def shift_ms_of(by: float | timedelta | str) -> int:
    """So many milliseconds later; below zero: sooner.  Raises InvalidArgument."""
    try:
        if isinstance(by, str) and by.startswith("-"):
            shift_ms = -delay_ms(by[1:])
        elif isinstance(by, str):
            shift_ms = delay_ms(by.removeprefix("+"))
        elif isinstance(by, timedelta):
            shift_ms = delay_ms(by) if by >= timedelta() else -delay_ms(-by)
        else:
            shift_ms = delay_ms(by) if not by < 0 else -delay_ms(-by)
    except (InvalidArgument, TypeError):
        shift_ms = 0
    if not shift_ms or abs(shift_ms) > DUE_MS_MAX:
        raise checks.wrong("by", by, "seconds, a timedelta, or text as 250ms, 1h30m, -5m; not zero")
    return shift_ms
