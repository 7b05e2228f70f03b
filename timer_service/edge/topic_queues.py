"""Whether a topic is there, for messages that a shard is to keep for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from duemq.errors import NotReady, TopicNotFound, Unavailable
from duemq.protocol.route import Queue
from duemq_server.timer_service.edge.broker_links import BrokerLinks

# A topic that was just made: so long its route may be on its way.
TOPIC_WAIT_S = 2.0


async def topic_queues(links: BrokerLinks, topic: str, field: str = "topic") -> Sequence[Queue]:
    """The topic's, which is named in `field`.  Raises NotReady, TopicNotFound, Unavailable."""
    queues = links.queues_of(topic)
    if not queues:
        queues = await links.queues_soon(topic, TOPIC_WAIT_S)
    if queues:
        return queues
    if not links.routes_known:
        raise NotReady("this timer service does not know the routes yet", field=field)
    if lost := ", ".join(links.lost_brokers):
        raise Unavailable(
            f"no broker serves topic {topic!r}; lost lately: {lost}", field=field, value=topic
        )
    if any(await asyncio.gather(*(each.has_topic(topic) for each in links.live))):
        raise NotReady(f"the route of topic {topic!r} is on its way", field=field, value=topic)
    raise TopicNotFound(
        f"no broker serves topic {topic!r}: make it first, as with `duemq topic create`",
        field=field,
        value=topic,
    )
