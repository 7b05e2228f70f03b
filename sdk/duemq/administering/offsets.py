"""The offsets of consumer groups, moved at all brokers: where the groups go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from duemq.administering.asking import Absent, Answers, Method, refuse_missing
from duemq.administering.groups import Groups, done_at
from duemq.descriptions import OffsetChange
from duemq.errors import (
    GroupNotFound,
    MissingBroker,
    PartialAnswer,
    TopicNotFound,
)
from duemq.protocol import checks, moments
from duemq.protocol.limits import OFFSET_MAX, QUEUES_MAX
from duemq.protocol.moments import Moment
from duemq.protocol.names import is_system
from duemq.transport import status
from duemq.v1 import group_admin_pb2, stubs

# Broker, dry run → the call.
_MethodOf = Callable[[str, bool], Method["group_admin_pb2.ResetOffsetsResponse"]]


class Offsets(Groups):
    """What the admin client does about offsets of groups."""

    async def reset_offsets(
        self,
        group: str,
        topic: str,
        to: Moment | None = None,
        *,
        offset: int | None = None,
        queues: Iterable[tuple[str, int]] | None = None,
        dry_run: bool = False,
    ) -> list[OffsetChange]:
        """Moves a group's offsets in a topic; members go on from there, within about a second.

        `to`: "earliest", "latest", or a time (an aware datetime, epoch milliseconds, RFC 3339 text,
        "-1h"): the first message stored then or later.  `offset` in its place.  `queues`: (broker,
        queue) pairs; None: all.  `dry_run` changes nothing.  What was sent back past the new offset
        is delivered again; callbacks that are running are not stopped.

        Raises GroupNotFound, TopicNotFound, QueueNotFound, OffsetOutOfRange, InvalidArgument, and
        Unavailable if a broker is away; then, and in all these cases, nothing was changed, unless
        the error says so.  Of a dry run PartialAnswer, whose `partial` is the list.
        """
        request = _reset_of(group, topic, to, offset)
        wanted = _by_broker(queues)
        away = [
            each
            for each in await self._check_known(group, dry_run=dry_run, needed=wanted)
            if not wanted or each.name in wanted
        ]
        silent = {each.name for each in away}
        live = [broker.name for broker in self._asker.brokers()]
        brokers = [broker for broker in wanted or live if broker not in silent]

        def method(broker: str, dry: bool) -> Method[group_admin_pb2.ResetOffsetsResponse]:
            made = group_admin_pb2.ResetOffsetsRequest()
            made.CopyFrom(request)
            made.dry_run = dry
            made.queue_ids.extend(wanted.get(broker, ()))
            return stubs.GroupAdminStub.ask("ResetOffsets", made)

        return await self._move(brokers, method, (TopicNotFound,), dry_run, topic, away)

    async def skip_backlog(
        self, group: str, topic: str | None = None, *, dry_run: bool = False
    ) -> list[OffsetChange]:
        """Moves a group to the end of a topic, or of all that it has read but its retries.

        Raises as `reset_offsets`.
        """
        if topic is not None:
            return await self.reset_offsets(group, topic, "latest", dry_run=dry_run)
        found = await self._group_described(group, self._asker.timeout_s)
        if not dry_run:
            refuse_missing(found.missing, "nothing was changed")
        changes: list[OffsetChange] = []
        for each in sorted({each.topic for each in found.progress if not is_system(each.topic)}):
            try:
                changes += await self.reset_offsets(group, each, "latest", dry_run=dry_run)
            except PartialAnswer as error:
                if error.partial is None:
                    raise
                changes += cast(list[OffsetChange], error.partial)
        refuse_missing(found.missing, partial=changes)
        return changes

    async def clone_offsets(
        self, group: str, to_group: str, topic: str | None = None, *, dry_run: bool = False
    ) -> list[OffsetChange]:
        """Gives `to_group` the offsets that `group` has, in one topic or in all but its retries.

        Raises as `reset_offsets`.
        """
        _check_topic(topic)
        away = await self._check_known(group, dry_run=dry_run)
        silent = {each.name for each in away}
        brokers = [each.name for each in self._asker.brokers() if each.name not in silent]

        def method(_: str, dry: bool) -> Method[group_admin_pb2.ResetOffsetsResponse]:
            request = group_admin_pb2.CloneOffsetsRequest(
                group=group, to_group=to_group, topic=topic or "", dry_run=dry
            )
            return stubs.GroupAdminStub.ask("CloneOffsets", request)

        # A broker may have no offset of the group, or nothing of the topic.
        return await self._move(
            brokers, method, (GroupNotFound, TopicNotFound), dry_run, topic, away
        )

    async def _move(
        self,
        brokers: Sequence[str],
        method: _MethodOf,
        absent: Absent,
        dry_run: bool,
        topic: str | None,
        away: Sequence[MissingBroker],
    ) -> list[OffsetChange]:
        """A dry run at every broker; then, if all can and `dry_run` is off, the real one.

        `away`: what a dry run lacks.
        """
        planned = await self._ask_to_move(brokers, method, absent, True)
        missing = (*away, *planned.missing)
        if topic and not planned.by_broker:
            refuse_missing(missing, "nothing was changed")
            raise TopicNotFound(f"no topic {topic!r}", field="topic", value=topic)
        changes = _changes_of(planned.by_broker, "nothing was changed")
        refuse_missing(missing, "nothing was changed", changes if dry_run else None)
        if dry_run or not changes:
            return changes
        # What was deleted meanwhile has nothing to change any more.
        done = await self._ask_to_move(list(planned.by_broker), method, absent, False)
        refuse_missing(done.missing, done_at(done.by_broker, "have changed theirs"))
        return _changes_of(done.by_broker, "all other queues were changed")

    async def _ask_to_move(
        self, brokers: Sequence[str], method: _MethodOf, absent: Absent, dry_run: bool
    ) -> Answers[group_admin_pb2.ResetOffsetsResponse]:
        methods = {broker: method(broker, dry_run) for broker in brokers}
        return await self._asker.gather(methods, absent, self._asker.timeout_s)

    async def _check_known(
        self, group: str, *, dry_run: bool, needed: Iterable[str] = ()
    ) -> tuple[MissingBroker, ...]:
        """The brokers that are away.  Raises GroupNotFound.

        Raises PartialAnswer, unless it is a dry run, for those that are `needed`, or for any.
        """
        found = await self._group_described(group, self._asker.timeout_s)
        if not dry_run:
            lacking = [each for each in found.missing if not needed or each.name in needed]
            refuse_missing(lacking, "nothing was changed")
        return found.missing


def _by_broker(queues: Iterable[tuple[str, int]] | None) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for broker, queue in _pairs(queues):
        checks.whole("queues", queue, 0, QUEUES_MAX - 1)
        found.setdefault(broker, []).append(queue)
    if queues is not None and not found:
        raise checks.wrong("queues", [], "(broker, queue) pairs, or None for all")
    return found


def _pairs(queues: object) -> Iterable[tuple[str, int]]:
    listed: list[Any] = (
        [] if queues is None else list(queues) if isinstance(queues, Iterable) else [queues]
    )
    for each in listed:
        if not (isinstance(each, Sequence) and len(each) == 2 and isinstance(each[0], str)):
            raise checks.wrong("queues", each, "(broker, queue) pairs, or None for all")
    return listed


def _check_topic(topic: str | None) -> None:
    """Raises InvalidArgument for an empty name, which on the wire is all topics."""
    if topic == "":
        raise checks.wrong("topic", topic, "a topic's name")


def _reset_of(
    group: str, topic: str, to: Moment | None, offset: int | None
) -> group_admin_pb2.ResetOffsetsRequest:
    """Raises InvalidArgument."""
    _check_topic(topic)
    if (to is None) == (offset is None):
        raise checks.wrong("to", to, "one of the two: to (earliest, latest, a time), or offset")
    request = group_admin_pb2.ResetOffsetsRequest(group=group, topic=topic)
    if offset is not None:
        checks.between("offset", offset, 0, OFFSET_MAX)
        request.offset = offset
    elif to == "earliest":
        request.earliest = True
    elif to == "latest":
        request.latest = True
    elif to is not None:
        request.at_ms = moments.epoch_ms(to, time.time_ns() // 1_000_000, "to")
    return request


def _changes_of(
    answers: Mapping[str, group_admin_pb2.ResetOffsetsResponse], else_done: str
) -> list[OffsetChange]:
    """Raises the first refusal of a queue; `else_done`: what became of the others."""
    changes: list[OffsetChange] = []
    for broker, answer in answers.items():
        for change in answer.changes:
            if change.HasField("error"):
                error = status.from_proto(change.error)
                raise type(error)(
                    f"{broker}: {error.message}; {else_done}",
                    field=error.field,
                    value=error.value,
                    limit=error.limit,
                )
            changes.append(
                OffsetChange(
                    change.topic,
                    broker,
                    change.queue_id,
                    None if change.before < 0 else change.before,
                    change.after,
                    change.min_offset,
                    change.max_offset,
                )
            )
    return sorted(changes, key=lambda each: (each.topic, each.broker, each.queue))
