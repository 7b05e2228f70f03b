"""Timer handles as text: what `send(delay=…)` answers and `cancel` takes.

`dmq1`, then URL-safe base64 without padding of a duemq.v1.TimerHandle's bytes and the CRC-32
(IEEE, little-endian) of them.  The checksum tells a mistyped handle from an unknown one.  Pure.
"""

import binascii
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from zlib import crc32

from google.protobuf.message import DecodeError

from duemq.protocol import checks
from duemq.v1.message_pb2 import TimerHandle

PREFIX = "dmq1"
CHARS_MAX = 128
_CRC = struct.Struct("<I")


def encode(store_id: int, queue_id: int, offset: int, due_ms: int) -> str:
    """The handle of the message at `offset` of the store's %TIMER% queue."""
    body = TimerHandle(
        store_id=store_id, queue_id=queue_id, offset=offset, due_ms=due_ms
    ).SerializeToString()
    return PREFIX + urlsafe_b64encode(body + _CRC.pack(crc32(body))).rstrip(b"=").decode()


def text_of(told: TimerHandle) -> str:
    """As `encode`."""
    return encode(told.store_id, told.queue_id, told.offset, told.due_ms)


def decode(handle: str) -> TimerHandle:
    """Raises InvalidArgument for what `encode` cannot have made."""
    if handle is None:
        raise checks.wrong(
            "handle", handle, "a timer handle (a message without a due time has none)"
        )
    if not isinstance(handle, str) or not handle.startswith(PREFIX) or len(handle) > CHARS_MAX:
        raise checks.wrong("handle", handle, f"a timer handle: text that starts with {PREFIX}")
    text = handle[len(PREFIX) :]
    try:
        packed = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except (binascii.Error, UnicodeEncodeError):
        raise checks.wrong("handle", handle, "a timer handle in URL-safe base64") from None
    body, crc = packed[: -_CRC.size], packed[-_CRC.size :]
    # Not all bits of the last character are in the bytes.
    mistyped = urlsafe_b64encode(packed).rstrip(b"=").decode() != text
    if mistyped or len(crc) != _CRC.size or _CRC.unpack(crc)[0] != crc32(body):
        raise checks.wrong(
            "handle", handle, "a timer handle whose checksum matches: copy all of it"
        )
    try:
        return TimerHandle.FromString(body)
    except DecodeError:
        raise checks.wrong("handle", handle, "a timer handle") from None


def decode_all(handles: object) -> list[TimerHandle]:
    """`decode` of each.  Raises InvalidArgument, also for what is no list of handles."""
    if not isinstance(handles, list | tuple):
        raise checks.wrong("handle", handles, "a handle or a list of them")
    return [decode(handle) for handle in handles]
