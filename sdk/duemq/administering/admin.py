"""The asyncio admin client; the synchronous one is a face of it.

Each broker keeps its own topics and offsets, so most answers are asked of all of them and joined.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, overload

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
from duemq.producing.cancels import CancelOutcome, Handle, Handles
from duemq.protocol.moments import Moment
from duemq.protocol.names import dead_letter_topic
from duemq.protocol.retry_policy import Delay, ExponentialDelays, RetryPolicy, policy_of
from duemq.settings import ClientSettings
from duemq.transport.cluster_client import Addresses, Client


class Admin:
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

        As `duemq.Admin.create_topic`.
        """
        return await self._topics.create(name, queues, message_bytes_max, brokers)

    async def delete_topic(self, name: str) -> None:
        """Deletes a topic and its messages on every broker.  Raises TopicNotFound."""
        await self._topics.delete(name)

    async def purge_topic(self, name: str, *, dry_run: bool = False) -> list[PurgedQueue]:
        """Takes all messages of a topic away.  As `duemq.Admin.purge_topic`."""
        return await self._topics.purge(name, dry_run)

    async def topics(self, *, system: bool = False) -> list[TopicSummary]:
        """All topics, sorted by name.  `system`: with those of DueMQ itself."""
        return await self._topics.all(system=system)

    async def describe_topic(self, name: str) -> TopicDescription:
        """A topic, queue by queue.  As `duemq.Admin.describe_topic`."""
        return await self._topics.describe(name)

    # ── groups ───────────────────────────────────────────────────────────────────────

    async def groups(self, *, lag: bool = False) -> list[GroupSummary]:
        """All consumer groups with members, offsets or settings, sorted by name.

        As `duemq.Admin.groups`.
        """
        return await self._groups.all(lag=lag)

    async def describe_group(self, name: str) -> GroupDescription:
        """A group: members, assignment, and how far it is in each queue.

        As `duemq.Admin.describe_group`.
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

        As `duemq.Admin.put_group`.
        """
        return await self._groups.put(name, policy_of(retries_max, retry_delays, exponential))

    async def delete_group(self, name: str) -> None:
        """Forgets a group's settings and offsets, and its retries; its dead letters stay.

        As `duemq.Admin.delete_group`.
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

        As `duemq.Admin.reset_offsets`.
        """
        return await self._groups.reset(group, topic, to, offset, queues, dry_run)

    async def skip_backlog(
        self, group: str, topic: str | None = None, *, dry_run: bool = False
    ) -> list[OffsetChange]:
        """Moves a group to the end of a topic, or of all that it has read but its retries.

        As `duemq.Admin.skip_backlog`.
        """
        return await self._groups.skip(group, topic, dry_run)

    async def clone_offsets(
        self, group: str, to_group: str, topic: str | None = None, *, dry_run: bool = False
    ) -> list[OffsetChange]:
        """Gives `to_group` the offsets that `group` has, in one topic or in all but its retries.

        As `duemq.Admin.clone_offsets`.
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

        As `duemq.Admin.find_messages`.
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

        As `duemq.Admin.describe_message`.
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

        As `duemq.Admin.dead_letters`.
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

        As `duemq.Admin.resend_dead_letters`.
        """
        selection = Selection(group, message_id, key, since, until, limit, resent)
        resending = Resending(on_sent)
        async with aclosing(self._dead_letters.resend(selection, to_topic)) as pages:
            async for page in pages:
                resending.add(page)
        return resending.done()

    async def purge_dead_letters(self, group: str, *, dry_run: bool = False) -> list[PurgedQueue]:
        """Takes all dead letters of a group away.  As `duemq.Admin.purge_dead_letters`."""
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
        """Gives up a broker, or a timer service, that is gone for good.

        As `duemq.Admin.forget`.
        """
        return await self._forgetting.forget(name, timer=timer, dry_run=dry_run)

    async def timer_stats(self) -> list[TimerStats]:
        """The timer shards, sorted.  One that does not answer, or is missing, has an error."""
        return await self._probes.timer_stats()

    async def timer_owners(self) -> list[TimerOwner]:
        """Who owns each queue of delayed messages.  As `duemq.Admin.timer_owners`."""
        return await self._timer_shards.owners()

    async def release_timer_shard(self, shard: int) -> list[TimerOwner]:
        """Gives up the timer service of a shard whose data directory is lost; what it owned.

        The next timer service of that shard takes its queues over, and it is refused for good.
        What it held and had not delivered is lost; a few messages that it had taken over last may
        come twice.  Raises InvalidArgument if nobody owns the shard, or if the owner was seen
        within the last minute; Unavailable.
        """
        return await self._timer_shards.release(shard)

    @overload
    async def cancel(self, handle: Handle) -> CancelOutcome: ...  # type: ignore[overload-overlap]
    @overload
    async def cancel(self, handle: Handles) -> list[CancelOutcome]: ...
    async def cancel(self, handle: Handle | Handles) -> CancelOutcome | list[CancelOutcome]:
        """Cancels delayed messages.  As `duemq.Producer.cancel`."""
        timeout_s = self._client.settings.request_timeout_s
        if isinstance(handle, Handle):
            return (await cancels.cancel(self._client, [handle], timeout_s))[0]
        return await cancels.cancel(self._client, handle, timeout_s)
