"""From a pull's answer for one queue to the messages that a subscription takes."""

from google.protobuf.message import DecodeError

from duemq.consumer.subscription import Filter
from duemq.errors import Corrupt
from duemq.message import Message, messages_of
from duemq.v1 import view_pb2


def received(records: view_pb2.QueueRecordsView, broker: str, wanted: Filter) -> list[Message]:
    """Brokers compare hashes of tags: messages whose tag only collides are left out here.

    Raises Corrupt if the records cannot be decoded: brokers store what they are sent.
    """
    if not records.records:
        return []
    try:
        messages = messages_of(records, broker)
    except DecodeError as error:
        first = records.run_offsets[0]
        raise Corrupt(
            f"a record of topic {records.topic}, {broker}/{records.queue_id}, offsets {first} to"
            f" {records.next_offset - 1} cannot be decoded: {error}",
            field="offset",
            value=first,
        ) from error
    return messages if wanted.takes_all else [m for m in messages if wanted.takes(m.tag)]
