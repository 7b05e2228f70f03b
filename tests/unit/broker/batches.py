"""Batches for tests: what a client would send, in plain types."""

import struct
from dataclasses import dataclass

from duemq.protocol.record_bytes import text_hash


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def record(
    body: bytes = b"body", *, key: str = "", tag: str = "", properties: bytes = b""
) -> bytes:
    parts = [field(1, body), field(2, b"id")]
    if key:
        parts.append(field(3, key.encode()))
    if tag:
        parts.append(field(4, tag.encode()))
    if properties:
        parts.append(field(6, field(1, b"p") + field(2, properties)))
    return b"".join(parts)


def entry(content: bytes) -> bytes:
    return b"\x0a" + varint(len(content)) + content


@dataclass
class FakeBatch:
    topic: str = "orders"
    queue_id: int = 0
    producer_id: int = 0
    producer_epoch: int = 0
    sequence: int = 0
    records: bytes = b""
    sizes: bytes = b""
    tag_hashes: bytes = b""
    key_hashes: bytes = b""
    delays_ms: bytes = b""
    due_ms: bytes = b""
    delay_levels: bytes = b""
    not_before_ms: int = 0
    untraced: bool = False
    early_ms: bytes = b""


def batch(bodies: list[bytes], *, tags: list[str] | None = None, **fields: object) -> FakeBatch:
    tags = tags or [""] * len(bodies)
    entries = [entry(record(body, tag=tag)) for body, tag in zip(bodies, tags, strict=True)]
    count = len(entries)
    return FakeBatch(
        records=b"".join(entries),
        sizes=struct.pack(f"<{count}I", *map(len, entries)),
        tag_hashes=struct.pack(f"<{count}I", *(text_hash(tag.encode()) for tag in tags)),
        key_hashes=bytes(4 * count),
        **fields,  # type: ignore[arg-type]
    )
