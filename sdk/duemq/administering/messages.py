"""Messages looked up, and their lives, asked of all brokers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from duemq.administering import finding
from duemq.administering.asking import Asking
from duemq.administering.finding import LOOKUP_TIMEOUT_S
from duemq.descriptions import (
    DeliveryState,
    FoundMessages,
    GroupDelivery,
    MessageTrace,
    StoredMessage,
)
from duemq.errors import (
    MissingBroker,
    OffsetOutOfRange,
    PermissionDenied,
    QueueNotFound,
    TopicNotFound,
)
from duemq.message import Message
from duemq.protocol import checks, moments
from duemq.protocol.limits import OFFSET_MAX, QUEUE_ID_MAX
from duemq.protocol.moments import Moment
from duemq.protocol.names import TIMER_TOPIC, group_of, is_retry, is_system
from duemq.settings import TIMEOUT_S
from duemq.v1 import admin_pb2, message_admin_pb2, stubs

LIMIT_MAX = 10_000
# Of messages with one id: a producer that sends itself twice, not one that the SDK repeats.
STORED_MAX = 10
COPIES_MAX = 1_000


class Messages(Asking):
    """What the admin client does about messages."""

    async def find_messages(
        self,
        topic: str,
        *,
        message_id: str | None = None,
        key: str | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        broker: str | None = None,
        queue: int | None = None,
        offset: int | None = None,
        limit: int = 64,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> FoundMessages:
        """Looks messages up at all brokers, or at one; they come by store time.

        By `message_id` or `key` or neither; stored at `since` or later, and before `until` (times
        as in `reset_offsets`); of one `queue`, from an `offset` of it on.  A key is found by the
        brokers' key index.  A message id of the SDK says when it was made: the log from a minute
        before to ten minutes after is read first, and what is found there is the answer.  For any
        other id, and if nothing is there, all of the range is read: name one where you can.  Of
        more than `limit` (at most 10,000), those first in their queues are answered, and `more` is
        set.

        Brokers that do not answer, or not to the end within `timeout_s`, are in `missing`.  Raises
        TopicNotFound, QueueNotFound, InvalidArgument; Unavailable for a `broker` never heard of.
        """
        checks.between("limit", limit, 1, LIMIT_MAX)
        checks.number("timeout_s", timeout_s, 0, TIMEOUT_S[1])
        request = finding.request_of(
            topic, message_id=message_id, key=key, since=since, until=until
        )
        _place(request, queue, offset)
        found = await self._find(request, limit, broker, timeout_s)
        return FoundMessages(tuple(found.messages), found.more, tuple(found.missing))

    async def _find(
        self,
        request: message_admin_pb2.FindMessagesRequest,
        limit: int,
        broker: str | None,
        timeout_s: float,
    ) -> finding.SearchAnswer:
        if broker is not None and all(each.name != broker for each in self._client.missing):
            self._client.broker(broker)  # what never was here is not waited for
        brokers = None if broker is None else [broker]
        found = await finding.find(
            self._asker, request, limit, brokers=brokers, timeout_s=timeout_s
        )
        if not found.served and not found.missing:
            if request.HasField("queue_id"):
                queue = request.queue_id
                raise QueueNotFound(
                    f"no queue {queue} of topic {request.topic!r}", field="queue", value=queue
                )
            raise TopicNotFound(f"no topic {request.topic!r}", field="topic", value=request.topic)
        return found

    async def describe_message(
        self,
        topic: str,
        message_id: str,
        *,
        since: Moment | None = None,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> MessageTrace:
        """The life of a message: where it lies, what each group has made of it, its retries.

        `since`: it was not sent before; spares reading older logs.  Brokers that do not answer, or
        not to the end within `timeout_s` a look-up, are in `missing`, and topics of the system that
        this client may not read.  Raises InvalidArgument.
        """
        checks.filled("message_id", message_id)
        checks.number("timeout_s", timeout_s, 0, TIMEOUT_S[1])
        now_ms = time.time_ns() // 1_000_000
        from_ms = 0 if since is None else moments.epoch_ms(since, now_ms, "since")
        missing: list[MissingBroker] = []
        stored = await self._by_id(topic, message_id, from_ms, STORED_MAX, timeout_s, missing)
        described = await asyncio.gather(
            *(self._deliveries(message, missing) for message in stored)
        )
        groups = {each.group for one in described for each in one.groups}
        if stored:
            from_ms = min(message.store_ms for message in stored)
        copies, returning = await self._copies(
            message_id, from_ms, groups if stored else None, timeout_s, missing
        )
        delayed = [message for message in stored if message.due_ms]
        if delayed and since is None:
            # It was accepted after it was made, by clocks that may differ.
            from_ms = max(0, min(each.born_ms for each in delayed) - finding.CLOCKS_APART_MS_MAX)
        elif delayed and since is not None:
            from_ms = moments.epoch_ms(since, now_ms, "since")
        timed: list[Message] = []
        # What is not delayed is there only between a failure and its retry.
        if delayed or not stored or returning:
            brokers = None if delayed or not stored else returning
            timed = await self._by_id(
                TIMER_TOPIC, message_id, from_ms, COPIES_MAX, timeout_s, missing, brokers
            )
        copies.sort(key=lambda each: each.store_ms)
        waiting = _waiting(timed, copies)
        by_name = {each.name: each for each in missing}
        return MessageTrace(
            message_id,
            tuple(_with_failures(one, [*copies, *waiting]) for one in described),
            tuple(copies),
            tuple(each for each in timed if each.retry is None),
            tuple(by_name[name] for name in sorted(by_name)),
            tuple(waiting),
        )

    async def _by_id(
        self,
        topic: str,
        message_id: str,
        from_ms: int,
        limit: int,
        timeout_s: float,
        missing: list[MissingBroker],
        brokers: list[str] | None = None,
    ) -> list[Message]:
        """None where nobody serves the topic (any more); of a system's one, where it is denied."""
        request = message_admin_pb2.FindMessagesRequest(
            topic=topic, message_id=message_id, from_ms=from_ms
        )
        try:
            found = await finding.find(
                self._asker, request, limit, brokers=brokers, timeout_s=timeout_s
            )
        except PermissionDenied as error:
            if not is_system(topic):
                raise
            missing.append(MissingBroker(topic, str(error)))
            return []
        missing += found.missing
        return found.messages

    async def _deliveries(self, message: Message, missing: list[MissingBroker]) -> StoredMessage:
        request = message_admin_pb2.DescribeDeliveryRequest(
            topic=message.stored_topic, queue_id=message.queue, offset=message.offset
        )
        answers = await self._asker.gather(
            {message.broker: stubs.MessageAdminStub.ask("DescribeDelivery", request)},
            (OffsetOutOfRange, TopicNotFound),  # retention or a delete was faster
            self._asker.timeout_s,
        )
        missing += answers.missing
        return StoredMessage(
            message,
            tuple(
                GroupDelivery(each.group, _STATES[each.state], each.offset)
                for answer in answers.by_broker.values()
                for each in answer.groups
            ),
        )

    async def _copies(
        self,
        message_id: str,
        from_ms: int,
        groups: set[str] | None,
        timeout_s: float,
        missing: list[MissingBroker],
    ) -> tuple[list[Message], list[str]]:
        """What groups sent back, and the brokers where more may wait for its time.

        `groups`: those that may have sent it back, None: any.
        """
        request = admin_pb2.ListTopicsRequest(system=True)
        answers = await self._asker.each(stubs.BrokerAdminStub.ask("ListTopics", request))
        missing += answers.missing
        served: defaultdict[str, list[str]] = defaultdict(list)
        for broker, answer in answers.by_broker.items():
            for config in answer.topics:
                if _may_hold_copies(config.name, groups):
                    served[config.name].append(broker)
        copies: list[Message] = []
        for topic, brokers in sorted(served.items()):
            copies += await self._by_id(
                topic, message_id, from_ms, COPIES_MAX, timeout_s, missing, brokers
            )
        returning = {
            broker
            for topic, brokers in served.items()
            if is_retry(topic)  # made when a message is sent back the first time
            for broker in brokers
        }
        return copies, sorted(returning)


_STATES = {
    message_admin_pb2.WAITING: DeliveryState.WAITING,
    message_admin_pb2.IN_FLIGHT: DeliveryState.IN_FLIGHT,
    message_admin_pb2.CONSUMED: DeliveryState.CONSUMED,
    message_admin_pb2.SENT_BACK: DeliveryState.SENT_BACK,
}


def _waiting(timed: Iterable[Message], copies: Iterable[Message]) -> list[Message]:
    """Of what was sent back into %TIMER%, what did not come out into a %RETRY% topic yet."""
    fired = Counter(
        (copy.retry.group, copy.deliveries)
        for copy in copies
        if copy.retry is not None and is_retry(copy.stored_topic)
    )
    waiting = []
    for each in timed:
        if each.retry is None:
            continue
        delivery = (each.retry.group, each.deliveries)
        if fired[delivery]:
            fired[delivery] -= 1
        else:
            waiting.append(each)
    return waiting


def _with_failures(one: StoredMessage, copies: Iterable[Message]) -> StoredMessage:
    """A group's commit passes what it has sent back, which is not consumed for that."""
    message = one.message
    place = (message.topic, message.broker, message.queue, message.offset)
    failed = {copy.retry.group for copy in copies if copy.retry and copy.retry[:4] == place}
    groups = (
        replace(each, state=DeliveryState.SENT_BACK)
        if each.state is DeliveryState.CONSUMED and each.group in failed
        else each
        for each in one.groups
    )
    return StoredMessage(message, tuple(groups))


def _may_hold_copies(topic: str, groups: Iterable[str] | None) -> bool:
    group = group_of(topic)
    return bool(group) and (groups is None or group in groups)


def _place(
    request: message_admin_pb2.FindMessagesRequest, queue: int | None, offset: int | None
) -> None:
    """Raises InvalidArgument."""
    if queue is not None:
        checks.between("queue", queue, 0, QUEUE_ID_MAX)
        request.queue_id = queue
    if offset is not None:
        if queue is None:
            raise checks.wrong("offset", offset, "given with a queue: it is that of one")
        checks.between("offset", offset, 0, OFFSET_MAX)
        request.offset = offset
