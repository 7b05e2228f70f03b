"""Durations and sizes as settings have them."""

import math
import re
import sys
from collections.abc import Mapping
from fractions import Fraction
from typing import TypeVar

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_BYTES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_AMOUNT = re.compile(r"\s*([+-]?[0-9]{1,400}(?:\.[0-9]{1,400})?)\s*([A-Za-z]*)\s*")

N = TypeVar("N", int, float)  # seconds are float, bytes int


def duration(text: str | float) -> float:
    """Seconds from `10`, `"500ms"`, `"10s"`, `"5m"`, `"1h"` or `"3d"`; raises ValueError."""
    if (
        isinstance(text, int | float)
        and not isinstance(text, bool)
        and abs(text) <= sys.float_info.max  # TOML knows inf and nan
    ):
        return float(text)
    return _amount(text, _SECONDS, "a duration such as 500ms, 10s, 5m, 1h or 3d")


def size(text: str | int) -> int:
    """Whole bytes of `4096`, `"64KiB"`, `"4MiB"`, `"18.8GiB"` or `"2TiB"`; raises ValueError."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    number, unit = _parts(text, _BYTES, "a size such as 4096, 64KiB, 4MiB or 1GiB")
    return math.floor(Fraction(number) * unit)  # a float would round up what is just below


def _amount(text: object, units: Mapping[str, float], expected: str) -> float:
    number, unit = _parts(text, units, expected)
    return float(number) * unit


def _parts(text: object, units: Mapping[str, N], expected: str) -> tuple[str, N]:
    """Number and unit, whose product is finite.  Raises ValueError."""
    match = _AMOUNT.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise ValueError(expected)
    if not math.isfinite(float(match[1]) * units[match[2]]):
        raise ValueError(expected)
    return match[1], units[match[2]]
