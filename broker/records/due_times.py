"""Due times: delays, absolute times and delay levels become one due time a record.  Pure.

A delay counts from the broker's clock at acceptance, so a client's clock does not matter.  A due
time in the past is legal: the message is delivered at once.  An illegal one is refused, never
clamped.
"""

import re

import numpy as np
import numpy.typing as npt

from duemq.errors import InvalidArgument
from duemq_server.broker.records.batch import Batch

DUE_MS_MAX = 253_402_300_799_999  # 9999-12-31T23:59:59.999Z
DEFAULT_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
LEVELS_MAX = 256

_LEVEL = re.compile(r"(\d{1,9})(ms|s|m|h|d)\Z")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

DueTimes = npt.NDArray[np.int64]


def parse_levels(text: str, field: str = "delay_levels") -> tuple[int, ...]:
    """Milliseconds of each delay of a table such as `1s 5s 1m 2h`; raises InvalidArgument."""
    words = text.split()
    if not 0 < len(words) <= LEVELS_MAX:
        raise _illegal(field, len(words), f"1 to {LEVELS_MAX} delays")
    levels = []
    for word in words:
        match = _LEVEL.match(word)
        if not match:
            raise _illegal(field, word, "a number and one of ms, s, m, h, d")
        levels.append(int(match[1]) * _UNIT_MS[match[2]])
    return tuple(levels)


def is_timed(batch: Batch) -> bool:
    """Whether the batch has due times."""
    return bool(batch.delays_ms or batch.due_ms or batch.delay_levels)


def resolve(batch: Batch, count: int, now_ms: int, levels_ms: tuple[int, ...]) -> DueTimes:
    """A due time for each of the batch's `count` records; raises InvalidArgument."""
    delays, dues, levels = batch.delays_ms, batch.due_ms, batch.delay_levels
    if bool(delays) + bool(dues) + bool(levels) > 1:
        raise _illegal("due_ms", "more than one", "one of delays_ms, due_ms and delay_levels")
    if delays:
        values = _column("delays_ms", delays, "<i8", count)
        _check_range("delays_ms", values, 0, DUE_MS_MAX - now_ms)
        due = values + now_ms
    elif dues:
        due = _column("due_ms", dues, "<i8", count)
        _check_range("due_ms", due, 0, DUE_MS_MAX)
    else:
        numbers = _column("delay_levels", levels, "<u4", count).astype(np.int64)
        _check_range("delay_levels", numbers, 1, len(levels_ms))
        due = np.array(levels_ms, dtype=np.int64)[numbers - 1] + now_ms
    return np.full(count, due[0], dtype=np.int64) if len(due) != count else due.astype(np.int64)


def _column(field: str, data: bytes, kind: str, count: int) -> npt.NDArray[np.int64]:
    if len(data) % np.dtype(kind).itemsize:
        raise _illegal(field, f"{len(data)} bytes", "whole entries")
    values = np.frombuffer(data, dtype=kind)
    if len(values) not in (1, count):
        raise _illegal(field, f"{len(values)} entries", f"1 or {count}, the number of records")
    return values


def _check_range(field: str, values: DueTimes, low: int, high: int) -> None:
    for value in (int(values.min()), int(values.max())):
        if not low <= value <= high:
            raise _illegal(field, value, f"{low} to {high}")


def _illegal(field: str, value: object, limit: str) -> InvalidArgument:
    return InvalidArgument(
        f"{field}: {value} is not allowed: {limit}", field=field, value=value, limit=limit
    )
