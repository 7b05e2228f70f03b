"""Looking into a shard: what is asked of it that changes nothing.

Owned by the event loop.  What is answered is committed: another leader would say the same.
"""

from __future__ import annotations

import dataclasses

from duemq.errors import InvalidArgument
from duemq_server.timer_service.log_loop import LogLoop
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.scheduling.topic_counts import OTHERS, TOPICS_MAX, TopicLedger


class Inspector:
    """Answers what a shard holds."""

    def __init__(self, scheduler: Scheduler, log_loop: LogLoop) -> None:
        self._scheduler = scheduler
        self._log_loop = log_loop

    async def counts(self, topic: str) -> dict[str, TopicLedger]:
        """The ledger by topic; of one topic, if it is not empty.

        Raises InvalidArgument for a topic that is counted with others.
        """
        topics = self._scheduler.topics
        self._check_counted(topic)
        found = {name: dataclasses.replace(each) for name, each in topics if topic in ("", name)}
        await self._committed()
        return found

    def _check_counted(self, topic: str) -> None:
        topics = self._scheduler.topics
        if topic and not topics.counted(topic) and any(name == OTHERS for name, _ in topics):
            raise InvalidArgument(
                f"topic {topic!r} may be one of those that are counted together: this shard has"
                f" had more than {TOPICS_MAX} topics",
                field="topic",
                value=topic,
                limit=TOPICS_MAX,
            )

    async def _committed(self) -> None:
        """Until all that memory shows by now is."""
        await self._log_loop.durable(self._scheduler.log.end_position)
