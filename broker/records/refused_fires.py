"""Due messages that can never be stored as what they are: dead letters of the timer service.  Pure.

What a broker accepted for a later time it stores when it is due, whatever the limits are by then
(store.py).  What remains are batches that are damaged on their way or made by a faulty service.
Refused, they would stand in front of all that follows.  They go to `%DLQ%%TIMER%` with the reason,
where `duemq dlq list %TIMER%` shows them.
"""

import secrets
from collections.abc import Iterator

from duemq.errors import Corrupt, DuemqError
from duemq.protocol import names
from duemq.protocol.limits import BATCH_RECORDS_MAX, ERROR_CHARACTERS_MAX
from duemq.protocol.record_bytes import read_entry, varint
from duemq_server.broker.records import columns, retry_record
from duemq_server.broker.records.batch import Columns, IncomingBatch
from duemq_server.broker.records.retry_record import MessagePlace, Story

TOPIC = names.dead_letter_topic(names.TIMER_GROUP)
_BODY_TAG, _MESSAGE_ID_TAG = b"\x0a", b"\x12"


def letters_of(batch: IncomingBatch, reason: DuemqError, now_ms: int) -> Columns:
    """The batch as dead letters: its records, or one with all its bytes if there are none."""
    place = MessagePlace(batch.topic, "", batch.queue_id, 0)
    error = reason.message[:ERROR_CHARACTERS_MAX]
    story = Story(names.TIMER_GROUP, place, now_ms, now_ms, error, place)
    try:
        letters = [retry_record.rewritten(each, 0, story) for each in _records(batch.records)]
        data = b"".join(letters)
        sizes, tags, keys = columns.derive_columns(data, BATCH_RECORDS_MAX)
        if not 0 < len(letters) <= BATCH_RECORDS_MAX:
            raise Corrupt(f"{len(letters)} records")
    except DuemqError:
        data = retry_record.rewritten(_wrapped(batch.records), 0, story)
        sizes, tags, keys = columns.derive_columns(data, 1)
    return Columns(len(sizes) // 4, data, sizes, tags, keys)


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        head, end = read_entry(data, at, len(data))
        if head < 0:
            raise Corrupt(f"byte {at}: no record begins there")
        yield data[head:end]
        at = end


def _wrapped(body: bytes) -> bytes:
    message_id = secrets.token_hex(16).encode()
    parts = (_BODY_TAG, varint(len(body)), body, _MESSAGE_ID_TAG, varint(32), message_id)
    return b"".join(parts)
