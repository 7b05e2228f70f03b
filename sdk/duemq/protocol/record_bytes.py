"""Bytes of protobuf messages that are written by hand.  Pure."""

_SMALL = tuple(bytes([value]) for value in range(0x80))


def varint(value: int) -> bytes:
    """A non-negative number as a varint."""
    if value <= 0x7F:
        return _SMALL[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
