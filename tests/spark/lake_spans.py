"""Trace messages made up: a batch a message, of which each span is known by its number."""

import numpy as np

from duemq.v1.message_pb2 import Record
from duemq.v1.trace_pb2 import SpanBatch

T0_NS = 1_699_999_200_000_000_000  # 2023-11-14 22:00 UTC, just before it is stored
ROWS = 10


def record(number):
    """ROWS spans; the ids say which they are."""
    ids = np.arange(1 + number * ROWS, 1 + (number + 1) * ROWS, dtype=">u8").tobytes()
    starts = [T0_NS + (number * ROWS + row) * 60_000_000_000 for row in range(ROWS)]
    batch = SpanBatch(rows=ROWS, span_ids=ids, start_ns=starts, duration_ns=[1_000] * ROWS)
    batch.topic.values.append("orders")
    batch.topic.rows.extend([0] * ROWS)
    return Record(body=batch.SerializeToString())


def span_ids(numbers):
    """Of these messages' spans, in order."""
    return [f"{1 + n * ROWS + row:016x}" for n in numbers for row in range(ROWS)]
