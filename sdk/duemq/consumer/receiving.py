"""From a pull's answer for one queue to the messages that a subscription takes."""

import time

from duemq import tracing
from duemq.message import Message, messages_of
from duemq.tag_filter import TagFilter
from duemq.v1 import view_pb2


def received(
    records: view_pb2.QueueRecordsView,
    broker: str,
    tags: TagFilter,
    *,
    group: str = "",
    client_id: str = "",
) -> list[Message]:
    """The broker filtered by hash: messages whose tag only collides are left out here."""
    if not records.records:
        return []
    began_ns = time.time_ns()
    messages = messages_of(records, broker)
    if tracing.enabled() and tracing.traced(records.topic):
        tracing.record_receive(
            records.topic,
            broker,
            records.queue_id,
            messages[0].offset,
            len(messages),
            start_ns=began_ns,
            end_ns=time.time_ns(),
            group=group,
            client_id=client_id,
            records=records.records,
        )
    return messages if tags.takes_all else [m for m in messages if tags.takes(m.tag)]
