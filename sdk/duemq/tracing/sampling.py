"""The head decision: which messages get a trace.  Made before any work for them.

Of samplers that decide by chance (always on, always off, a ratio; by the parent where there is one)
nobody is asked message by message: how many messages to pass over is drawn, and the drawn one gets
a trace id that the sampler takes.  What has no memory may be drawn anew for each batch.

Where spans may be light (sends.py), messages are drawn by runs of up to RUN_MESSAGES of one frame:
each gets a trace with the sampler's probability, together with its neighbours.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from math import log, log1p
from random import getrandbits, randbytes, random
from struct import Struct
from typing import Any

from opentelemetry.context import Context, attach, get_current, set_value
from opentelemetry.trace import SpanContext

NEVER = 1 << 62
"""More messages than there are to pass over."""

RUN_MESSAGES = 512
"""Messages at most that one draw decides for; as many spans as one SpanBatch has."""

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8

_ID_LIMIT = 1 << 64  # of the half of a trace id that ratio samplers look at
_ROOT = r"(AlwaysOnSampler|AlwaysOffSampler|TraceIdRatioBased\{([0-9.e-]+)\})"
_CHILDREN = (
    ",remoteParentSampled:AlwaysOnSampler,remoteParentNotSampled:AlwaysOffSampler"
    ",localParentSampled:AlwaysOnSampler,localParentNotSampled:AlwaysOffSampler"
)
_KNOWN = re.compile(rf"{_ROOT}|ParentBased\{{root:{_ROOT}{_CHILDREN}\}}")


class Head:
    """What a sampler does, as far as it is known from its description."""

    def __init__(self, description: str) -> None:
        """`description`: what the sampler's `get_description` says; empty: there is none."""
        known = _KNOWN.fullmatch(description)
        root, ratio = (known[1] or known[3], known[2] or known[4]) if known else ("", None)
        self.known = known is not None
        """Otherwise it is to be asked about each message."""
        self.parent_based = known is not None and known[1] is None
        """What has a sampled parent gets a trace."""
        self._ratio = float(ratio) if ratio else float(root != "AlwaysOffSampler")
        self._bound = round(self._ratio * _ID_LIMIT)
        self._leading = _leading_bytes(self._bound)
        self._log_rest = log1p(-self._ratio) if 0 < self._ratio < 1 else 0.0

    def gap(self) -> int:
        """How many messages to pass over before the next one that gets a trace, or is asked for."""
        if self._log_rest:
            return int(min(NEVER, log(1.0 - random()) / self._log_rest))  # which may be infinite
        return 0 if self._ratio else NEVER

    def drawn(self, count: int) -> Iterator[int]:
        """Which of `count` messages get a trace, or are asked for."""
        at = self.gap()
        while at < count:
            yield at
            at += 1 + self.gap()

    def drawn_runs(self, count: int) -> Iterator[range]:
        """Which runs of `count` messages that are sent together get a trace."""
        runs = runs_of(count)
        return map(runs.__getitem__, self.drawn(len(runs)))

    def follows(self, parent: SpanContext) -> bool:
        """Whether a child of this span gets a trace; of known samplers."""
        if self.parent_based:
            return parent.trace_flags.sampled
        return parent.trace_id % _ID_LIMIT < self._bound

    def follows_all(self, trace_ids: bytes) -> bool:
        """The same of sampled parents with these trace ids, one after the other."""
        return self.parent_based or max(Struct(">8xQ").iter_unpack(trace_ids))[0] < self._bound

    def low_bits(self) -> int:
        """The lower half of a trace id that the sampler takes; of known samplers."""
        return getrandbits(64) * self._bound >> 64

    def trace_ids(self, count: int) -> bytes:
        """So many trace ids that the sampler takes, one after the other; of known samplers."""
        ids = bytearray(randbytes(TRACE_ID_BYTES * count))
        for place, table in enumerate(self._leading, TRACE_ID_BYTES // 2):
            ids[place::TRACE_ID_BYTES] = ids[place::TRACE_ID_BYTES].translate(table)
        return bytes(ids)


def runs_of(count: int) -> list[range]:
    """Cuts `count` messages into runs of about the same length."""
    runs = -(-count // RUN_MESSAGES)
    return [range(count * at // runs, count * (at + 1) // runs) for at in range(runs)]


def _leading_bytes(bound: int) -> list[bytes]:
    """What becomes of random bytes, a table for each, so that 8 that begin with them are below it.

    The bytes in front are zero, and the first other one is less than the bound's; the rest are left
    as they are.  Where the bound is all there can be, so are all.
    """
    if bound >= _ID_LIMIT:
        return []
    zeros = (64 - bound.bit_length()) // 8
    limit = bound >> (56 - 8 * zeros) if zeros < 8 else 0
    return [bytes(256)] * min(zeros, 7) + [bytes(byte * limit >> 8 for byte in range(256))]


class ChosenIds:
    """Ids of spans that the sampler is to take: the generator's, but for what the sampler reads."""

    def __init__(self, ids: Any, head: Head) -> None:
        self._ids = ids
        self._head = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ids, name)

    def generate_trace_id(self) -> int:
        """Of a span without a parent."""
        trace_id: int = self._ids.generate_trace_id()
        return (trace_id >> 64 or getrandbits(63) + 1) << 64 | self._head.low_bits()


def _context_reader() -> Callable[[], Mapping[str, object]]:
    """Reads the current context: `get_current`, or the variable it reads, at a fifth of the cost.

    Found by what changes when a context is attached, in a copy of everything.
    """

    def look() -> Callable[[], Mapping[str, object]]:
        marked = set_value("duemq", True, Context())
        attach(marked)
        found = [variable for variable, value in copy_context().items() if value is marked]
        return found[0].get if len(found) == 1 else get_current

    return copy_context().run(look)


current_context = _context_reader()
"""The current context; NO_CONTEXT while there is no span."""

NO_CONTEXT = contextvars.Context().run(current_context)
