"""Due times: delays, absolute times and delay levels become one due time a record.  Pure.

A delay counts from the broker's clock at acceptance, so a client's clock does not matter.  A due
time in the past is legal: the message is delivered at once.  An illegal one is refused, never
clamped.
"""

import numpy as np
import numpy.typing as npt

from duemq.protocol import checks
from duemq.protocol.due import DUE_MS_MAX
from duemq_server.broker.records.batch import IncomingBatch

DueTimes = npt.NDArray[np.int64]


def is_timed(batch: IncomingBatch) -> bool:
    """Whether the batch has due times."""
    return bool(batch.delays_ms or batch.due_ms or batch.delay_levels)


def resolve(batch: IncomingBatch, count: int, now_ms: int, levels_ms: tuple[int, ...]) -> DueTimes:
    """A due time for each of the batch's `count` records; raises InvalidArgument."""
    delays, dues, levels = batch.delays_ms, batch.due_ms, batch.delay_levels
    if bool(delays) + bool(dues) + bool(levels) > 1:
        raise checks.wrong("due_ms", "more than one", "one of delays_ms, due_ms and delay_levels")
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
        raise checks.wrong(field, f"{len(data)} bytes", "whole entries")
    values = np.frombuffer(data, dtype=kind)
    if len(values) not in (1, count):
        raise checks.wrong(field, f"{len(values)} entries", f"1 or {count}, the number of records")
    return values


def _check_range(field: str, values: DueTimes, low: int, high: int) -> None:
    for value in (int(values.min()), int(values.max())):
        checks.between(field, value, low, high)
