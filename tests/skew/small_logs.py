"""A member of a cluster as always, but for a timer service's log, of which it keeps little.

    python -m tests.skew.small_logs MODULE …

How much is no setting, and a replica needs a snapshot only where the log begins behind 0.
"""

from __future__ import annotations

from typing import Any

from duemq_server.local_cluster import child
from duemq_server.timer_service.timers.limits import Limits

SMALL = {"log_segment_bytes": 1 << 20, "log_kept_bytes": 1 << 20}


def main() -> None:
    """See the module."""
    make = Limits.__init__

    def small(limits: Limits, **named: Any) -> None:
        make(limits, **{**named, **SMALL})

    Limits.__init__ = small  # type: ignore[assignment, method-assign]
    child.main()


if __name__ == "__main__":
    main()
