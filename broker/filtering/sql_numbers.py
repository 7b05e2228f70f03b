"""Text that is a number, for SQL filters.  Pure."""

import math
import re

CHARACTERS_MAX = 64

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]+)?").fullmatch


def number_of(text: str) -> int | float | None:
    """The number that a text is: an integer exactly, any other as a double; None: it is none.

    Decimal digits with a sign, a point, an exponent, at most 64 characters.  No spaces, no other
    bases, no infinity.
    """
    if len(text) > CHARACTERS_MAX:
        return None
    if text.isdecimal() and text.isascii():
        return int(text)
    found = _NUMBER(text)
    if found is None:
        return None
    if found.lastindex is None:
        return int(text)
    value = float(text)
    return value if math.isfinite(value) else None
