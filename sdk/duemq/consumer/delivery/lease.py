"""How long a member may take its queues for its own.  Pure, but for the clock that it is given.

While the lease is over, ordered consumption starts no callback: README.md, "In order".
"""

import time
from collections import deque
from collections.abc import Callable

NEVER = float("inf")
# Of the session timeout.  What is left covers that a worker between its look at the clock and the
# callback waits for a processor.
LEASE_SHARE = 0.9


def _boot_clock() -> Callable[[], float]:
    """A clock that counts while the process is stopped, and where there is one, while the machine
    is suspended."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    if boot is None:
        return time.monotonic
    gettime = time.clock_gettime
    return lambda: gettime(boot)


since_boot = _boot_clock()


class Lease:
    """Of one member.  Written in its event loop; `until_s` is read by its workers."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = since_boot) -> None:
        """`lease_s`: from the sending of what is acknowledged."""
        self.clock = clock
        self.until_s = -NEVER
        """In the clock's seconds."""
        self._lease_s = lease_s
        self._hello_s: float | None = None
        # Heartbeats on their way; a handful: a member whose heartbeat is not answered before the
        # next is due gives the stream up.
        self._heartbeats_s: deque[float] = deque()
        self._begun = False
        self._renewed: list[Callable[[], object]] = []

    @classmethod
    def of_session(cls, session_timeout_s: float) -> "Lease":
        """Of a member that told its coordinator this session timeout."""
        return cls(session_timeout_s * LEASE_SHARE)

    @classmethod
    def forever(cls, clock: Callable[[], float] = since_boot) -> "Lease":
        """Of a consumer that shares its queues with nobody."""
        lease = cls(NEVER, clock)
        lease.until_s = NEVER
        return lease

    @property
    def over(self) -> bool:
        """The queues may be another's."""
        return self.clock() >= self.until_s

    def on_renewed(self, listener: Callable[[], object]) -> None:
        """Calls `listener` in the loop after each renewal."""
        self._renewed.append(listener)

    def begin(self) -> None:
        """A new stream to the coordinator: what the old one did not acknowledge counts no more."""
        self._begun = True
        self._hello_s = None
        self._heartbeats_s.clear()

    def sent(self) -> None:
        """Before a hello (the first after `begin`) or a heartbeat is written."""
        now_s = self.clock()
        if self._begun:
            self._begun, self._hello_s = False, now_s
        else:
            self._heartbeats_s.append(now_s)

    def heard(self, *, acknowledgement: bool) -> None:
        """After an event was dealt with: of a heartbeat the acknowledgement, or another one.

        Whatever comes first on a stream proves that the hello was heard.
        """
        sent_s, self._hello_s = self._hello_s, None
        if acknowledgement and self._heartbeats_s:
            sent_s = self._heartbeats_s.popleft()
        if sent_s is None:
            return
        self.until_s = max(self.until_s, sent_s + self._lease_s)
        if not self.over:
            for listener in self._renewed:
                listener()
