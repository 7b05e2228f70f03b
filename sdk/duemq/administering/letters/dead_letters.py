"""Dead letters of all brokers, by the time they died, and how they are sent again.

What dies while this goes on is left for the next time: the ends of the queues are taken first.  So
a letter that dies again at once is not sent again for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple

from duemq.administering import finding
from duemq.administering.asking import Method, refuse_missing
from duemq.administering.groups import Groups
from duemq.administering.letters.resending import (
    Letter,
    OnSent,
    Resending,
    Resent,
    copy_of,
    target_of,
)
from duemq.administering.topics import Topics
from duemq.descriptions import PurgedQueue
from duemq.errors import (
    DuemqError,
    Internal,
    MissingBroker,
    TopicNotFound,
    Unavailable,
)
from duemq.producing.producer import Producer
from duemq.producing.receipt import AwaitableReceipt
from duemq.protocol import checks
from duemq.protocol.moments import Moment
from duemq.protocol.names import check_topic, dead_letter_topic
from duemq.sent import Receipt
from duemq.settings import TIMEOUT_S, ProducerSettings
from duemq.v1 import admin_pb2, message_admin_pb2, stubs

log = logging.getLogger(__name__)

PAGE_MESSAGES_MAX = 500
PAGE_BYTES_MAX = 4 << 20
# What is on its way when a resend is cancelled gets so long to be answered, as much to be marked.
CALLED_OFF_S = 5.0
# For the route of a topic that nobody seems to serve.
ROUTE_TIMEOUT_S = 3.0

Outcome = tuple[Letter, Receipt | DuemqError]
Head = tuple[int, int, Letter]
"""When it died, the number of its stream."""


class Selection(NamedTuple):
    """Which dead letters of a group; None: no matter."""

    group: str
    message_id: str | None = None
    key: str | None = None
    since: Moment | None = None
    until: Moment | None = None
    limit: int | None = None
    resent: bool | None = None

    def request(self) -> message_admin_pb2.FindMessagesRequest:
        """Raises InvalidArgument."""
        checks.filled("group", self.group)
        if self.limit is not None:
            checks.whole("limit", self.limit, 1, 1 << 63)
        if self.resent is not None:
            checks.flag("resent", self.resent)
        request = finding.request_of(
            dead_letter_topic(self.group),
            message_id=self.message_id,
            key=self.key,
            since=self.since,
            until=self.until,
        )
        request.limit = min(self.limit or PAGE_MESSAGES_MAX, PAGE_MESSAGES_MAX)
        return request


class DeadLetters(Topics, Groups):
    """What the admin client does about dead letters."""

    async def dead_letters(
        self,
        group: str,
        *,
        message_id: str | None = None,
        key: str | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        limit: int | None = None,
        resent: bool | None = None,
    ) -> AsyncGenerator[Letter, None]:
        """The messages that a group has given up, by the time they died, of all brokers.

        By `message_id` or `key` or neither; that died at `since` or later, and before `until`
        (times as in `reset_offsets`); `limit` at most, None for all.  `resent`: only those that
        were sent again, or (False) were not; None: both.  They are read as they are asked for.
        A letter's `topic` is where it was sent to first, its `retry` says why it died.

        Raises GroupNotFound, InvalidArgument; PartialAnswer after the last one where a broker did
        not answer, so that not all were seen.
        """
        selection = Selection(group, message_id, key, since, until, limit, resent)
        async with aclosing(self._letter_pages(selection)) as pages:
            async for page in pages:
                for letter in page:
                    yield letter

    async def resend_dead_letters(
        self,
        group: str,
        *,
        message_id: str | None = None,
        key: str | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        limit: int | None = None,
        resent: bool | None = None,
        to_topic: str | None = None,
        on_sent: OnSent | None = None,
    ) -> Resent:
        """Sends dead letters again, as new messages with the property `duemq-dead-letter-id`.

        Chosen as by `dead_letters`; what dies meanwhile is not sent.  Each goes to the topic that
        it was sent to first, or to `to_topic`; topics are not made.  `on_sent(letter, outcome)` is
        told of each: its Receipt, or the error that it was not sent for.  The letters stay where
        they are, marked as `resent`; without `resent=False` calling this again sends them again.
        Cancelled, it waits up to 5 s for the answers to what it has sent, and marks that.

        Raises as `dead_letters`; what was sent by then is known by `on_sent`.
        """
        selection = Selection(group, message_id, key, since, until, limit, resent)
        resending = Resending(on_sent)
        async with aclosing(self._resent_pages(selection, to_topic)) as pages:
            async for page in pages:
                resending.add(page)
        return resending.done()

    async def purge_dead_letters(self, group: str, *, dry_run: bool = False) -> list[PurgedQueue]:
        """Takes all dead letters of a group away.  As `purge_topic`; raises GroupNotFound."""
        try:
            return await self.purge_topic(dead_letter_topic(group), dry_run=dry_run)
        except TopicNotFound:
            await self.describe_group(group)  # GroupNotFound, if there is none
            return []

    async def _letter_pages(self, selection: Selection) -> AsyncGenerator[list[Letter], None]:
        """By the time they died, in lists of a bounded size.

        Raises InvalidArgument, GroupNotFound; after the last, Unavailable for brokers that did not
        answer.
        """
        page: list[Letter] = []
        size, left = 0, selection.limit or -1
        missing: list[MissingBroker] = []
        async with aclosing(self._letters(selection, missing)) as letters:
            while left and (letter := await anext(letters, None)) is not None:
                page.append(letter)
                size += len(letter.body)
                left -= 1
                if len(page) >= PAGE_MESSAGES_MAX or size >= PAGE_BYTES_MAX:
                    yield page
                    page, size = [], 0
        if page:
            yield page
        by_name = {each.name: each for each in missing}
        # What the others have was handed out.
        refuse_missing([by_name[name] for name in sorted(by_name)], partial=())

    async def _letters(
        self, selection: Selection, missing: list[MissingBroker]
    ) -> AsyncGenerator[Letter, None]:
        """Of all brokers, merged; who does not answer joins `missing`."""
        request = selection.request()
        ends, away = await self._ends(selection.group)
        missing += away
        streams = [
            self._at(broker, request, ends[broker], selection.resent, missing)
            for broker in sorted(ends)
        ]
        try:
            heads = await _heads(streams)
            while heads:
                _, number, letter = heads[0]
                yield letter
                following = await anext(streams[number], None)
                if following is None:
                    heapq.heappop(heads)
                else:
                    heapq.heapreplace(heads, (following.store_ms, number, following))
        finally:
            for stream in streams:
                await stream.aclose()

    async def _ends(self, group: str) -> tuple[dict[str, dict[int, int]], list[MissingBroker]]:
        """Broker → queue → offset past its last dead letter; and who does not answer."""
        request = admin_pb2.DescribeTopicRequest(name=dead_letter_topic(group))
        answers = await self._asker.each(
            stubs.BrokerAdminStub.ask("DescribeTopic", request),
            (TopicNotFound,),
        )
        if not answers.by_broker and not answers.missing:
            await self.describe_group(group)  # GroupNotFound, if there is none
        ends = {
            broker: {queue.queue_id: queue.max_offset for queue in answer.queues}
            for broker, answer in answers.by_broker.items()
        }
        return ends, list(answers.missing)

    async def _at(
        self,
        broker: str,
        request: message_admin_pb2.FindMessagesRequest,
        ends: dict[int, int],
        resent: bool | None,
        missing: list[MissingBroker],
    ) -> AsyncGenerator[Letter, None]:
        """Of one broker, up to the ends; it joins `missing` if it stops to answer."""
        found = finding.messages_at(self._asker, broker, request, math.inf)
        try:
            async with aclosing(found):
                async for letter in found:
                    known = letter.offset < ends.get(letter.queue, 0)
                    if known and isinstance(letter, Letter) and resent in (None, letter.resent):
                        yield letter
        except TopicNotFound:
            return  # deleted meanwhile
        except (Unavailable, Internal) as error:
            missing.append(MissingBroker(broker, str(error)))

    async def _resent_pages(
        self, selection: Selection, to_topic: str | None
    ) -> AsyncGenerator[list[Outcome], None]:
        """What became of them, page by page; raises as `_letter_pages`."""
        if to_topic is not None:
            check_topic(to_topic)
        client = self._asker.client
        settings = ProducerSettings(
            create_topics=False,
            close_timeout_s=TIMEOUT_S[0],  # nothing is on its way by then, or was waited for
            client=client.settings,
        )
        async with (
            Producer(client.nameservers, settings=settings) as producer,
            aclosing(self._letter_pages(selection)) as pages,
        ):
            unserved: dict[str, DuemqError] = {}
            async for page in pages:
                yield await self._resend(producer, page, selection.group, to_topic, unserved)

    async def _resend(
        self,
        producer: Producer,
        page: list[Letter],
        group: str,
        to_topic: str | None,
        unserved: dict[str, DuemqError],
    ) -> list[Outcome]:
        """Sends a page, and has marked what was sent; also when it is cancelled."""
        answers: list[asyncio.Task[Receipt | DuemqError]] = []
        try:
            for letter in page:
                pending = await self._submit(producer, letter, to_topic, unserved)
                answers.append(asyncio.create_task(_outcome(pending)))
            await asyncio.wait(answers)
            outcomes = _known(page, answers)
            await self._mark(group, outcomes)
            return outcomes
        except asyncio.CancelledError:
            # What is on its way is stored: unmarked it would be sent once more.
            if answers:
                await asyncio.wait(answers, timeout=CALLED_OFF_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(CALLED_OFF_S):
                    await self._mark(group, _known(page, answers))
            raise
        finally:
            for each in answers:
                each.cancel()

    async def _mark(self, group: str, outcomes: list[Outcome]) -> None:
        """Has the brokers note what was sent again.  Should they not, it is logged only."""
        offsets: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for letter, outcome in outcomes:
            if isinstance(outcome, Receipt):
                offsets[letter.broker, letter.queue].append(letter.offset)

        async def mark(broker: str, queue: int, sent: list[int]) -> None:
            try:
                await self._asker.at(broker, self._marking(group, queue, sent))
            except DuemqError as error:
                log.warning("%d dead letters are sent again and not marked: %s", len(sent), error)

        # At once: there may be little time, and a broker that does not answer.
        await asyncio.gather(*(mark(*place, sent) for place, sent in offsets.items()))

    @staticmethod
    def _marking(
        group: str, queue: int, offsets: list[int]
    ) -> Method[message_admin_pb2.MarkResentResponse]:
        request = message_admin_pb2.MarkResentRequest(group=group, queue_id=queue, offsets=offsets)
        return stubs.MessageAdminStub.ask("MarkResent", request)

    async def _submit(
        self,
        producer: Producer,
        letter: Letter,
        to_topic: str | None,
        unserved: dict[str, DuemqError],
    ) -> AwaitableReceipt | DuemqError:
        try:
            topic = target_of(letter, to_topic)
            if topic in unserved:
                return unserved[topic]
            if topic not in producer.targets:
                await self._check_served(topic, unserved)
            copy = copy_of(letter)
            await producer.ready(topic)
            return producer.submit(
                topic,
                copy.body,
                key=copy.key,
                tag=copy.tag,
                ordering_key=copy.ordering_key,
                properties=copy.properties,
            )
        except DuemqError as error:
            return error

    async def _check_served(self, topic: str, unserved: dict[str, DuemqError]) -> None:
        """Raises TopicNotFound, and remembers it: each letter would wait for it anew."""
        try:
            await self._asker.client.topic_route(topic, timeout_s=ROUTE_TIMEOUT_S)
        except TopicNotFound as error:
            unserved[topic] = error
            raise


async def _heads(streams: Sequence[AsyncGenerator[Letter, None]]) -> list[Head]:
    """The first letter of each, as a heap.  Raises when none of them runs any more."""
    firsts = await asyncio.gather(
        *(anext(stream, None) for stream in streams), return_exceptions=True
    )
    heads: list[Head] = []
    for number, first in enumerate(firsts):
        if isinstance(first, BaseException):
            raise first
        if first is not None:
            heads.append((first.store_ms, number, first))
    heapq.heapify(heads)  # the number is unique among them: letters are not compared
    return heads


def _known(page: list[Letter], answers: list[asyncio.Task[Receipt | DuemqError]]) -> list[Outcome]:
    """What became of a page's letters, as far as they were sent and it is known."""
    return [
        (letter, each.result()) for letter, each in zip(page, answers, strict=False) if each.done()
    ]


async def _outcome(pending: AwaitableReceipt | DuemqError) -> Receipt | DuemqError:
    if isinstance(pending, DuemqError):
        return pending
    try:
        return await pending
    except DuemqError as error:
        return error
