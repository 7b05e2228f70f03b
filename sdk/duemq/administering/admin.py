"""The asyncio admin client; the synchronous one has its methods.

Each broker keeps its own topics and offsets, so most answers are asked of all of them and joined.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from duemq.administering.asking import Asker
from duemq.administering.dead_letters import DeadLetters, Selection
from duemq.administering.finding import LOOKUP_TIMEOUT_S
from duemq.administering.forgetting import Forgetting
from duemq.administering.groups import Groups
from duemq.administering.messages import Messages
from duemq.administering.probes import Probes
from duemq.administering.resending import Letter, OnSent, Resending, Resent
from duemq.administering.timer_shards import TimerShards
from duemq.administering.topics import Topics
from duemq.descriptions import (
    ClusterDescription,
    Forgotten,
    FoundMessages,
    GroupDescription,
    GroupSummary,
    MessageTrace,
    OffsetChange,
    PurgedQueue,
    TimerOwner,
    TimerStats,
    TopicDescription,
    TopicSummary,
)
from duemq.errors import TopicNotFound
from duemq.producing import cancels
from duemq.producing.cancels import Cancelling, CancelOutcome, Handles
from duemq.protocol.moments import Moment
from duemq.protocol.names import dead_letter_topic
from duemq.protocol.retry_policy import Delay, ExponentialDelays, RetryPolicy, policy_of
from duemq.settings import ClientSettings
from duemq.transport.cluster_client import Addresses, Client


class Admin(Cancelling):
    """Topics, groups, messages, timers and the state of the cluster.

    `await start()` (or `async with`) connects.  No answer is partial in silence: brokers that are
    away are in the answer's `missing`; where it has none, the call raises PartialAnswer, an
    Unavailable, with what the others answered.
    """

    def __init__(
        self,
        nameserver: Addresses | None = None,
        *,
        settings: ClientSettings | None = None,
    ) -> None:
        """`nameserver`: `host:port`, several separated by commas; None: DUEMQ_NAMESERVER's."""
        self._client = Client(nameserver, settings)
        asker = Asker(self._client)
        self._topics = Topics(asker)
        self._groups = Groups(asker)
        self._messages = Messages(asker)
        self._dead_letters = DeadLetters(asker, self._groups)
        self._probes = Probes(self._client)
        self._timer_shards = TimerShards(asker)
        self._forgetting = Forgetting(self._client)

    async def start(self) -> None:
        """Connects.  Raises Unavailable if no nameserver answers."""
        await self._client.start()

    async def close(self) -> None:
        """Ends the connections.  Idempotent."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ── topics ───────────────────────────────────────────────────────────────────────

    async def create_topic(
        self,
        name: str,
        *,
        queues: int = 0,
        message_bytes_max: int = 0,
        brokers: Iterable[str] | None = None,
    ) -> TopicSummary:
        """Makes a topic on every live broker, or on `brokers`, and waits until it can be used.

        `queues`: on each broker; 0: the broker's default.  `message_bytes_max`: of a body; 0: the
        broker's.  One queue on one broker keeps the order of all messages.  Raises InvalidArgument,
        TopicExists if no broker lacks it, Unavailable if one of them is away.
        """
        return await self._topics.create(name, queues, message_bytes_max, brokers)

    async def delete_topic(self, name: str) -> None:
        """Deletes a topic and its messages on every broker.

        Raises TopicNotFound, and PartialAnswer if a broker is away that may have it, too.
        """
        await self._topics.delete(name)

    async def purge_topic(self, name: str, *, dry_run: bool = False) -> list[PurgedQueue]:
        """Takes all messages of a topic away, for every group; what is sent from now on stays.

        Offsets go on.  The space comes back with retention.  `dry_run` only answers what would go.
        Raises TopicNotFound, InvalidArgument, and PartialAnswer, whose `partial` is what was done,
        if a broker is away.
        """
        return await self._topics.purge(name, dry_run)

    async def topics(self, *, system: bool = False) -> list[TopicSummary]:
        """All topics, sorted by name.  `system`: with those of DueMQ itself.

        Raises PartialAnswer, whose `partial` is the list, if a broker is away.
        """
        return await self._topics.all(system=system)

    async def describe_topic(self, name: str) -> TopicDescription:
        """A topic, queue by queue.

        Brokers that do not answer are in `missing`.  Raises TopicNotFound, and Unavailable if only
        a missing broker could know it.
        """
        return await self._topics.describe(name)

    # ── groups ───────────────────────────────────────────────────────────────────────

    async def groups(self, *, lag: bool = False) -> list[GroupSummary]:
        """All consumer groups with members, offsets or settings, sorted by name.

        `lag`: with how far each is behind: a question more a group.  Raises PartialAnswer, whose
        `partial` is the list, if a broker is away.
        """
        return await self._groups.all(lag=lag)

    async def describe_group(self, name: str) -> GroupDescription:
        """A group: members, assignment, and how far it is in each queue.

        Brokers that do not answer are in `missing`; all others in the rest.  Raises GroupNotFound,
        and Unavailable if only a missing broker could know it.
        """
        return await self._groups.describe(name)

    async def put_group(
        self,
        name: str,
        *,
        retries_max: int | None = None,
        retry_delays: Sequence[Delay] | str | None = None,
        exponential: ExponentialDelays | tuple[Delay, float, Delay] | None = None,
    ) -> RetryPolicy:
        """Makes a group at every live broker, or replaces its settings; answers what is in force.

        `retries_max`: deliveries after the first.  `retry_delays`: before each retry, the last one
        for all beyond; a list, or one text as "10s 30s 1m".  `exponential` in its place:
        (initial, multiplier, longest).  What is not given is as the brokers are set.  A group need
        not be made to be used, unless the brokers are set so.  Raises InvalidArgument, and
        Unavailable if a broker is away: call again when it is back.
        """
        return await self._groups.put(name, policy_of(retries_max, retry_delays, exponential))

    async def delete_group(self, name: str) -> None:
        """Forgets a group's settings and offsets, and its retries; its dead letters stay.

        Raises GroupNotFound, InvalidArgument while it has members, and Unavailable if a broker is
        away.
        """
        await self._groups.delete(name)

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
        return await self._groups.reset(group, topic, to, offset, queues, dry_run)

    async def skip_backlog(
        self, group: str, topic: str | None = None, *, dry_run: bool = False
    ) -> list[OffsetChange]:
        """Moves a group to the end of a topic, or of all that it has read but its retries.

        Raises as `reset_offsets`.
        """
        return await self._groups.skip(group, topic, dry_run)

    async def clone_offsets(
        self, group: str, to_group: str, topic: str | None = None, *, dry_run: bool = False
    ) -> list[OffsetChange]:
        """Gives `to_group` the offsets that `group` has, in one topic or in all but its retries.

        Raises as `reset_offsets`.
        """
        return await self._groups.clone(group, to_group, topic, dry_run)

    # ── messages ─────────────────────────────────────────────────────────────────────

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
        TopicNotFound, QueueNotFound, InvalidArgument.
        """
        return await self._messages.find(
            topic,
            message_id=message_id,
            key=key,
            since=since,
            until=until,
            broker=broker,
            queue=queue,
            offset=offset,
            limit=limit,
            timeout_s=timeout_s,
        )

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
        not to the end within `timeout_s` a look-up, are in `missing`.  Raises InvalidArgument.
        """
        return await self._messages.trace(topic, message_id, since, timeout_s)

    # ── dead letters ─────────────────────────────────────────────────────────────────

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
        async with aclosing(self._dead_letters.pages(selection)) as pages:
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

        Raises as `dead_letters`; what was sent by then is known by `on_sent`.
        """
        selection = Selection(group, message_id, key, since, until, limit, resent)
        resending = Resending(on_sent)
        async with aclosing(self._dead_letters.resend(selection, to_topic)) as pages:
            async for page in pages:
                resending.add(page)
        return resending.done()

    async def purge_dead_letters(self, group: str, *, dry_run: bool = False) -> list[PurgedQueue]:
        """Takes all dead letters of a group away.  As `purge_topic`; raises GroupNotFound."""
        try:
            return await self._topics.purge(dead_letter_topic(group), dry_run)
        except TopicNotFound:
            await self._groups.describe(group)  # GroupNotFound, if there is none
            return []

    # ── the cluster ──────────────────────────────────────────────────────────────────

    async def cluster(self) -> ClusterDescription:
        """What runs.  Who does not answer is listed with the error."""
        return await self._probes.cluster()

    async def forget(self, name: str, *, timer: bool = False, dry_run: bool = False) -> Forgotten:
        """Gives up a broker, or a timer service, that is gone for good; what it had.

        From now on no answer is partial for its sake, and ordering keys leave its queues.  One that
        comes back is there again.  `dry_run` only answers.  Nameservers that did not answer are in
        `missing`: they list it still, so call again.  Raises InvalidArgument while one of them
        hears it, InstanceNotFound if none remembers it as lost, Unavailable.
        """
        return await self._forgetting.forget(name, timer=timer, dry_run=dry_run)

    async def timer_stats(self) -> list[TimerStats]:
        """The timer shards, sorted.  One that does not answer, or is missing, has an error."""
        return await self._probes.timer_stats()

    async def timer_owners(self) -> list[TimerOwner]:
        """Who owns each queue of delayed messages.

        Raises PartialAnswer, whose `partial` is the list, if a broker is away.
        """
        return await self._timer_shards.owners()

    async def release_timer_shard(self, shard: int) -> list[TimerOwner]:
        """Gives up the timer service of a shard whose data directory is lost; what it owned.

        The next timer service of that shard takes its queues over, and it is refused for good.
        What it held and had not delivered is lost; a few messages that it had taken over last may
        come twice.  Raises InvalidArgument if nobody owns the shard, or if the owner was seen
        within the last minute; Unavailable.
        """
        return await self._timer_shards.release(shard)

    async def _cancel(self, handles: Handles) -> list[CancelOutcome]:
        timeout_s = self._client.settings.request_timeout_s
        return await cancels.cancel(self._client, handles, timeout_s)
