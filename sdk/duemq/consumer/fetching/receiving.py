"""From a pull's answer for one queue to the messages that a subscription takes."""

import logging
from collections.abc import Iterator

from google.protobuf.message import DecodeError

from duemq.consumer.fetching.subscription import Filter
from duemq.errors import Corrupt
from duemq.message import Message, messages_of
from duemq.protocol.record_bytes import read_entry
from duemq.v1 import view_pb2

log = logging.getLogger(__name__)

_NAMED_MAX = 10


def received(records: view_pb2.QueueRecordsView, broker: str, wanted: Filter) -> list[Message]:
    """Brokers compare hashes of tags: messages whose tag only collides are left out here.

    Brokers look into no record of a batch whose sender says the sizes: what cannot be decoded is
    left out too, with an error in the log, and stops nobody.  Raises Corrupt if it cannot be told
    where a record begins.
    """
    if not records.run_counts:
        return []
    try:
        messages = messages_of(records, broker)
    except DecodeError:
        messages = _decodable(records, broker)
    return messages if wanted.takes_all else [m for m in messages if wanted.takes(m.tag)]


def _decodable(records: view_pb2.QueueRecordsView, broker: str) -> list[Message]:
    """Those of the messages that can be decoded, one by one."""
    messages: list[Message] = []
    lost: list[int] = []
    entries = _entries(records, broker)
    for start, count, store_ms in zip(
        records.run_offsets, records.run_counts, records.run_store_ms, strict=True
    ):
        for offset in range(start, start + count):
            entry = next(entries, None)
            if entry is None:
                raise _corrupt(records, broker)
            one = view_pb2.QueueRecordsView(
                topic=records.topic,
                queue_id=records.queue_id,
                records=entry,
                run_offsets=[offset],
                run_counts=[1],
                run_store_ms=[store_ms],
            )
            try:
                messages += messages_of(one, broker)
            except DecodeError:
                lost.append(offset)
    named = ", ".join(map(str, lost[:_NAMED_MAX])) + (", …" if len(lost) > _NAMED_MAX else "")
    log.error(
        "%d of the records of topic %s, %s/%d cannot be decoded and are passed over: what was sent"
        " is no message; offsets %s",
        len(lost),
        records.topic,
        broker,
        records.queue_id,
        named,
    )
    return messages


def _entries(records: view_pb2.QueueRecordsView, broker: str) -> Iterator[bytes]:
    """The entries of a RecordBatch, tag and length included."""
    data, at = records.records, 0
    while at < len(data):
        start, end = read_entry(data, at, len(data))
        if start < 0:
            raise _corrupt(records, broker)
        yield data[at:end]
        at = end


def _corrupt(records: view_pb2.QueueRecordsView, broker: str) -> Corrupt:
    first = records.run_offsets[0]
    return Corrupt(
        f"the records of topic {records.topic}, {broker}/{records.queue_id}, offsets {first} to"
        f" {records.next_offset - 1} cannot be told apart",
        field="offset",
        value=first,
    )
