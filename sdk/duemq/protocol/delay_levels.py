"""Tables of delays: `1s 5s 1m 2h`.  Pure."""

import re

from duemq.protocol import checks
from duemq.protocol.due import UNITS_MS

DEFAULT_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
"""As brokers are set by default; level 1 is the first."""
LEVELS_MAX = 256

_DELAY = re.compile(rf"(\d{{1,9}})({'|'.join(UNITS_MS)})", re.ASCII)


def parse_levels(text: str, field: str = "delay_levels") -> tuple[int, ...]:
    """Milliseconds of each delay of a table.  Raises InvalidArgument."""
    words = text.split()
    checks.count(field, len(words), 1, LEVELS_MAX, "delays")
    levels = []
    for word in words:
        match = _DELAY.fullmatch(word)
        if not match:
            raise checks.wrong(field, word, "a number and one of ms, s, m, h, d")
        levels.append(int(match[1]) * UNITS_MS[match[2]])
    return tuple(levels)
