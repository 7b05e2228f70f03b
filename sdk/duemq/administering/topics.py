"""Topics, asked of all brokers and joined."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from duemq.administering.asking import (
    SHOWN_WITHOUT_TIMEOUT_S,
    Absent,
    Answers,
    Asking,
    Method,
    refuse_missing,
)
from duemq.descriptions import PurgedQueue, QueueRange, TopicDescription, TopicSummary
from duemq.errors import (
    Internal,
    MissingBroker,
    TopicExists,
    TopicNotFound,
    TopicReplaced,
    Unavailable,
)
from duemq.protocol import checks
from duemq.protocol.limits import QUEUES_MAX
from duemq.protocol.route import Broker, RouteCache
from duemq.v1 import admin_pb2, stubs


class Topics(Asking):
    """What the admin client does about topics."""

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
        checks.whole("queues", queues, 0, QUEUES_MAX)
        checks.whole("message_bytes_max", message_bytes_max, 0, (1 << 32) - 1)
        config = admin_pb2.TopicConfig(
            name=name, queues=queues, message_bytes_max=message_bytes_max
        )
        chosen = self._chosen(brokers)
        names = {broker.name for broker in chosen}
        request = admin_pb2.CreateTopicRequest(topic=config)
        creating = stubs.BrokerAdminStub.ask("CreateTopic", request)
        made, away = await self._done(dict.fromkeys(names, creating), (TopicExists,))
        refuse_missing(list(away.values()), _again("create", made))
        if not made:
            raise TopicExists(f"topic {name!r} exists", field="name", value=name)
        await self._client.wait_for(
            lambda routes: (
                (route := routes.route(name)) is not None
                and {served.broker for served in route.brokers} >= names
            ),
            self._asker.timeout_s,
        )
        topics, _ = await self._listed(system=True)
        found = [each for each in topics if each.name == name]
        if not found:
            raise TopicNotFound(f"topic {name!r} was deleted again", field="name", value=name)
        return found[0]

    def _chosen(self, names: Iterable[str] | None) -> Sequence[Broker]:
        if names is None:
            return self._asker.brokers()
        listed = [] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
        if not listed or not all(isinstance(name, str) for name in listed):
            raise checks.wrong("brokers", listed or names, "a list of names, or None for all")
        return [self._client.broker(name) for name in sorted(set(listed))]

    async def _done(
        self, methods: Mapping[str, Method[object]], done_before: Absent
    ) -> tuple[list[str], dict[str, MissingBroker]]:
        """A method a broker: where it was done; who is away."""
        done: list[str] = []
        away: dict[str, MissingBroker] = {}

        async def at(broker: str) -> None:
            attempts = 0

            async def attempt(*to: object, **more: object) -> object:
                nonlocal attempts
                attempts += 1
                return await methods[broker](*to, **more)

            try:
                await self._asker.at(broker, attempt)
            except done_before:
                if attempts == 1:
                    return  # else an answer was lost
            except (Unavailable, Internal) as error:
                away[broker] = MissingBroker(broker, str(error))
                return
            done.append(broker)

        await asyncio.gather(*map(at, methods))
        return sorted(done), away

    async def delete_topic(self, name: str) -> None:
        """Deletes a topic and its messages on every broker.

        Raises TopicNotFound, and PartialAnswer if a broker is away that may have it, too.
        """
        found = await self._described_topic(name, self._asker.timeout_s)
        ids = {broker: answer.topic_id for broker, answer in found.by_broker.items()}
        deleted, away = await self._done(
            {broker: self._deleting(name, topic_id) for broker, topic_id in ids.items()},
            (TopicNotFound, TopicReplaced),
        )
        away |= {each.name: each for each in (*found.missing, *self._client.missing)}
        missing = [away[broker] for broker in sorted(away)]
        if not deleted:
            refuse_missing(missing, f"the others know no topic {name!r}")
            raise TopicNotFound(f"no topic {name!r}", field="name", value=name)

        def gone(routes: RouteCache) -> bool:
            route = routes.route(name)
            told = route.topic_ids if route is not None else {}
            return all(broker in away or told.get(broker) != ids[broker] for broker in ids)

        await self._client.wait_for(gone, self._asker.timeout_s)
        refuse_missing(missing, _again("delete", deleted), deleted)

    @staticmethod
    def _deleting(name: str, topic_id: int) -> Method[admin_pb2.DeleteTopicResponse]:
        """By its id: a repetition after a lost answer spares what was made anew since."""
        request = admin_pb2.DeleteTopicRequest(name=name, topic_id=topic_id)
        return stubs.BrokerAdminStub.ask("DeleteTopic", request)

    async def purge_topic(self, name: str, *, dry_run: bool = False) -> list[PurgedQueue]:
        """Takes all messages of a topic away, for every group; what is sent from now on stays.

        Offsets go on.  The space comes back with retention.  `dry_run` only answers what would go.
        Raises TopicNotFound, InvalidArgument, and PartialAnswer, whose `partial` is what was done,
        if a broker is away.
        """
        timeout_s = SHOWN_WITHOUT_TIMEOUT_S if dry_run else self._asker.timeout_s
        found = await self._described_topic(name, timeout_s)
        purged = [
            PurgedQueue(name, each.broker, each.queue, each.max_offset, each.messages)
            for each in _queues(found)
        ]
        missing = list(found.missing)
        if not dry_run:
            done = await self._asker.gather(
                {broker: self._purging(answer) for broker, answer in found.by_broker.items()},
                (TopicNotFound, TopicReplaced),  # deleted meanwhile
                self._asker.timeout_s,
            )
            missing += done.missing
            purged = [each for each in purged if each.broker in done.by_broker]
        refuse_missing(missing, partial=purged)
        return purged

    @staticmethod
    def _purging(found: admin_pb2.TopicDescription) -> Method[admin_pb2.TopicDescription]:
        """Up to the ends that were seen: a repetition takes nothing that came since."""
        cuts = [
            admin_pb2.QueueCut(queue_id=queue.queue_id, before_offset=queue.max_offset)
            for queue in found.queues
        ]
        request = admin_pb2.PurgeTopicRequest(
            name=found.topic.name, cuts=cuts, topic_id=found.topic_id
        )
        return stubs.BrokerAdminStub.ask("PurgeTopic", request)

    async def topics(self, *, system: bool = False) -> list[TopicSummary]:
        """All topics, sorted by name.  `system`: with those of DueMQ itself.

        Raises PartialAnswer, whose `partial` is the list, if a broker is away.
        """
        topics, missing = await self._listed(system=system)
        refuse_missing(missing, partial=topics)
        return topics

    async def _listed(
        self, *, system: bool
    ) -> tuple[list[TopicSummary], tuple[MissingBroker, ...]]:
        request = admin_pb2.ListTopicsRequest(system=system)
        answers = await self._asker.each(stubs.BrokerAdminStub.ask("ListTopics", request))
        found: defaultdict[str, dict[str, admin_pb2.TopicConfig]] = defaultdict(dict)
        for broker, answer in answers.by_broker.items():
            for config in answer.topics:
                found[config.name][broker] = config
        topics = [
            TopicSummary(
                name,
                sum(config.queues for config in configs.values()),
                min(config.message_bytes_max for config in configs.values()),
                tuple(sorted(configs)),
            )
            for name, configs in sorted(found.items())
        ]
        return topics, answers.missing

    async def describe_topic(self, name: str) -> TopicDescription:
        """A topic, queue by queue.

        Brokers that do not answer are in `missing`.  Raises TopicNotFound, and Unavailable if only
        a missing broker could know it.
        """
        found = await self._described_topic(name)
        return TopicDescription(
            name,
            min(answer.topic.message_bytes_max for answer in found.by_broker.values()),
            tuple(_queues(found)),
            found.missing,
        )

    async def _described_topic(
        self, name: str, timeout_s: float = SHOWN_WITHOUT_TIMEOUT_S
    ) -> Answers[admin_pb2.TopicDescription]:
        """Of the brokers that have the topic, at least one.  Raises as `describe_topic`."""
        request = admin_pb2.DescribeTopicRequest(name=name)
        found = await self._asker.each(
            stubs.BrokerAdminStub.ask("DescribeTopic", request), (TopicNotFound,), timeout_s
        )
        if not found.by_broker:
            refuse_missing(found.missing, f"the others know no topic {name!r}")
            raise TopicNotFound(f"no topic {name!r}", field="name", value=name)
        return found


def _queues(found: Answers[admin_pb2.TopicDescription]) -> Iterator[QueueRange]:
    for broker, answer in found.by_broker.items():
        for queue in answer.queues:
            yield QueueRange(
                broker,
                queue.queue_id,
                queue.min_offset,
                queue.max_offset,
                queue.last_store_ms or None,
                queue.in_per_s,
                queue.messages,
            )


def _again(verb: str, done: list[str]) -> str:
    return f"{verb}d at {', '.join(done) or 'none'}: {verb} it again when all are there"
