"""Process spans of messages of one pull, by column, where spans may be light (sends.py)."""

from __future__ import annotations

from collections.abc import Sequence
from random import randbytes
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.trace import Status

from duemq.message import records_of
from duemq.protocol.limits import SPAN_NUMBERS
from duemq.tracing.attributes import failure
from duemq.tracing.sampling import SPAN_ID_BYTES, TRACE_ID_BYTES

if TYPE_CHECKING:
    from duemq.message import Message

_DUES_MS = SPAN_NUMBERS["due_ms"]


class Call(NamedTuple):
    """One call of the application, for messages of one queue."""

    topic: str
    broker: str
    queue: int
    group: str
    client_id: str
    start_ns: int
    end_ns: int


_NO_CALL = Call("", "", 0, "", "", 0, 0)


class ProcessFrame(NamedTuple):
    """Light spans of one call: an entry a message in each column."""

    call: Call
    trace_ids: bytes
    parent_ids: bytes
    """Of the messages' creation contexts."""
    span_ids: bytes
    message_ids: Sequence[str]
    keys: Sequence[str]
    tags: Sequence[str]
    offsets: Sequence[int]
    body_bytes: Sequence[int]
    attempts: Sequence[int]
    due_ms: Sequence[int]
    failures: Sequence[tuple[str, Status] | None]

    def ended(self, call: Call, errors: Sequence[BaseException | None] = ()) -> ProcessFrame:
        """`errors`: why some failed."""
        failures = [None if error is None else failure(error) for error in errors]
        return ProcessFrame(call, *self[1:-1], failures or self.failures)

    @property
    def rows(self) -> int:
        """How many they are."""
        return len(self.message_ids)

    def part(self, first: int, past: int) -> ProcessFrame:
        """Some of them."""
        rest: list[Any] = [column[first:past] for column in self[4:]]
        return ProcessFrame(
            self.call,
            self.trace_ids[first * TRACE_ID_BYTES : past * TRACE_ID_BYTES],
            self.parent_ids[first * SPAN_ID_BYTES : past * SPAN_ID_BYTES],
            self.span_ids[first * SPAN_ID_BYTES : past * SPAN_ID_BYTES],
            *rest,
        )


def frame_of(messages: Sequence[Message], trace_ids: bytes, parent_ids: bytes) -> ProcessFrame:
    """Of callbacks to be, for these messages."""
    records = records_of(messages)
    count = len(records)
    return ProcessFrame(
        _NO_CALL,
        trace_ids,
        parent_ids,
        randbytes(SPAN_ID_BYTES * count),
        [record.message_id for record in records],
        [record.key for record in records],
        [record.tag for record in records],
        [message.offset for message in messages],
        [len(record.body) for record in records],
        [record.attempt for record in records],
        # A producer wrote it; beyond the limits it is no time.
        [due if (due := record.due_ms) in _DUES_MS else 0 for record in records],
        [None] * count,
    )
