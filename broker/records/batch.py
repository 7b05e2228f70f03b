"""A batch as a client sends it, and everything that can be wrong with it by itself.  Pure.

Limits are checked per batch, not per message: only a record larger than the limit on properties
or on bodies can break it.  Such records, and no others, are looked into: both limits are exact.
"""

from dataclasses import dataclass

import numpy as np

from duemq.errors import InvalidArgument, TooLarge
from duemq.protocol import checks, limits
from duemq.protocol.limits import BATCH_RECORDS_MAX
from duemq_server.broker.records import columns as layout


@dataclass(slots=True)
class IncomingBatch:
    """The fields of duemq.v1.BatchView, each taken out of it once: that copies."""

    topic: str
    queue_id: int
    producer_id: int
    producer_epoch: int
    sequence: int
    records: bytes
    sizes: bytes
    tag_hashes: bytes
    key_hashes: bytes
    delays_ms: bytes
    due_ms: bytes
    delay_levels: bytes
    not_before_ms: int = 0
    untraced: bool = False
    early_ms: bytes = b""


@dataclass(frozen=True)
class BatchLimits:
    """What one batch may hold, in bytes."""

    message_bytes_max: int = limits.MESSAGE_BYTES_DEFAULT
    batch_bytes_max: int = limits.BATCH_BYTES_DEFAULT
    properties_bytes_max: int = limits.PROPERTIES_BYTES_DEFAULT


@dataclass(slots=True)
class Columns:
    """The checked contents of a batch: its records and an array entry for each."""

    count: int
    records: bytes
    sizes: bytes
    tag_hashes: bytes
    key_hashes: bytes


def seen_later(batch: IncomingBatch, due_ms: int) -> list[tuple[int, int]]:
    """From which record on it is seen when, in order, as far as that is after `due_ms`."""
    if batch.not_before_ms <= due_ms:
        return []
    if not batch.early_ms:
        return [(0, batch.not_before_ms)]
    early_ms = np.frombuffer(batch.early_ms, dtype="<u4").astype(np.int64)
    times_ms = np.maximum(batch.not_before_ms - early_ms, due_ms)
    later = np.flatnonzero(np.diff(times_ms, prepend=due_ms))
    return list(zip(later.tolist(), times_ms[later].tolist(), strict=True))


def bytes_to_walk(batch: IncomingBatch, limits: BatchLimits, message_bytes_max: int) -> int:
    """How much of the batch `check` has to walk through field by field; mostly nothing."""
    size = len(batch.records)
    if size > limits.batch_bytes_max:
        return 0
    sizes = batch.sizes
    if not sizes:
        return size
    look_inside = min(limits.properties_bytes_max, message_bytes_max)
    if size <= look_inside or len(sizes) % 4:
        return 0
    return size if int(np.frombuffer(sizes, dtype="<u4").max()) > look_inside else 0


def check(batch: IncomingBatch, limits: BatchLimits, message_bytes_max: int) -> Columns:
    """The batch's columns, or InvalidArgument or TooLarge naming field, value and limit.

    `message_bytes_max` is the topic's; it is at most the broker's.
    """
    records = batch.records
    if not records:
        raise InvalidArgument("records: a batch needs at least one", field="records", value=0)
    if len(records) > limits.batch_bytes_max:
        raise TooLarge(
            f"records: {len(records)} bytes, at most {limits.batch_bytes_max} in a batch",
            field="records",
            value=len(records),
            limit=limits.batch_bytes_max,
        )
    sizes, tags, keys = batch.sizes, batch.tag_hashes, batch.key_hashes
    if not sizes and not tags and not keys:
        sizes, tags, keys = layout.derive_columns(records, BATCH_RECORDS_MAX)
        array = np.frombuffer(sizes, dtype="<u4")
        _check_count(len(array))
    else:
        _check_lengths(sizes, tags, keys)
        array = np.frombuffer(sizes, dtype="<u4")
        layout.check_layout(records, array)
    if batch.early_ms:
        _check_early(batch.early_ms, len(array))
    look_inside = min(limits.properties_bytes_max, message_bytes_max)
    if len(records) > look_inside and int(array.max()) > look_inside:
        _check_large(records, array, limits.properties_bytes_max, message_bytes_max, look_inside)
    return Columns(len(array), records, sizes, tags, keys)


def _check_lengths(sizes: bytes, tags: bytes, keys: bytes) -> None:
    _check_count(len(sizes) // 4)
    for field, column in (("sizes", sizes), ("tag_hashes", tags), ("key_hashes", keys)):
        if len(column) != len(sizes) or len(column) % 4:
            raise InvalidArgument(
                f"{field}: {len(column)} bytes of fixed32, but sizes has {len(sizes)};"
                " each needs one entry a record",
                field=field,
                value=len(column),
                limit=len(sizes),
            )


def _check_early(early_ms: bytes, count: int) -> None:
    if len(early_ms) != 4 * count:
        raise InvalidArgument(
            f"early_ms: {len(early_ms)} bytes of fixed32, but {4 * count} are needed; each record"
            " needs one entry",
            field="early_ms",
            value=len(early_ms),
            limit=4 * count,
        )
    values = np.frombuffer(early_ms, dtype="<u4")
    for at in np.flatnonzero(values[1:] > values[:-1])[:1].tolist():
        limit = f"at most {values[at]}, as the record before it has"
        raise checks.wrong("early_ms", int(values[at + 1]), limit)


def _check_count(count: int) -> None:
    checks.count("sizes", count, 1, BATCH_RECORDS_MAX, "records in a batch")


def _check_large(
    records: bytes,
    sizes: layout.U32Array,
    properties_bytes_max: int,
    message_bytes_max: int,
    look_inside: int,
) -> None:
    """Checks body and properties of the records that are large enough to break a limit."""
    ends = np.cumsum(sizes, dtype=np.int64)
    for index in np.flatnonzero(sizes > look_inside).tolist():
        end = int(ends[index])
        start = end - int(sizes[index])
        head = start + 1
        while records[head] >= 0x80:
            head += 1
        shape = layout.scan(records, head + 1, end)
        if shape.body_bytes > message_bytes_max:
            raise TooLarge(
                f"body: {shape.body_bytes} bytes in record {index}, at most {message_bytes_max}",
                field="body",
                value=shape.body_bytes,
                limit=message_bytes_max,
            )
        if shape.properties_bytes > properties_bytes_max:
            raise TooLarge(
                f"properties: {shape.properties_bytes} bytes in record {index},"
                f" at most {properties_bytes_max}",
                field="properties",
                value=shape.properties_bytes,
                limit=properties_bytes_max,
            )
