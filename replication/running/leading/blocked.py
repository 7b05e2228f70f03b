"""What a leader waits for: who counts and does not answer, or its own disk."""

from __future__ import annotations

import logging

from duemq_server.replication.protocol.leader import Leader

log = logging.getLogger(__name__)

TOLD_MS = 3_000
"""A replica that is started anew is back by then."""
ANOTHER = "another member"
"""All members are in sync, and fewer than `min_insync`: `duemq replica add` makes one."""


class Blocked:
    """Owned by Leading."""

    def __init__(self, leader: Leader, min_insync: int, lag_max_ms: int) -> None:
        self.names: tuple[str, ...] = ()
        """Whom it waits for, as of the last look."""
        self._leader = leader
        self._min = min_insync
        self._lag_max_ms = lag_max_ms
        self._since_ms: int | None = None
        self._told = ""
        self._synced_to: int | None = None  # all, or to there
        self._synced_ms = 0
        self.stalled_ms = 0
        """For how long a sync of the disk here is waited for."""

    def look(self, now_ms: int, *, unsynced: bool = False) -> tuple[str, ...]:
        """Their names, sorted; `now_ms`: of the steady clock.  The log is told if it lasts.

        `unsynced`: something is written here and not synced.
        """
        leader = self._leader
        self._look_at_disk(now_ms, unsynced=unsynced)
        names = {*self._silent(now_ms)}
        if not leader.set.enough:
            names |= {*(leader.record.missing or [ANOTHER])}
        self.names = tuple(sorted(names))
        self._tell(now_ms)
        return self.names

    def _look_at_disk(self, now_ms: int, *, unsynced: bool) -> None:
        synced_to = self._leader.durable if unsynced else None
        if synced_to is None or synced_to != self._synced_to:
            self._synced_to, self._synced_ms = synced_to, now_ms
        self.stalled_ms = now_ms - self._synced_ms

    def _silent(self, now_ms: int) -> list[str]:
        at_end_ms = {p.replica: p.at_end_ms for p in self._leader.followers.values()}
        return [
            each.name
            for each in self._leader.set.counted - {self._leader.me}
            if each not in at_end_ms or now_ms - at_end_ms[each] > self._lag_max_ms
        ]

    def _tell(self, now_ms: int) -> None:
        """Where it runs, too: an operator looks there first."""
        reason = self.reason
        if not reason:
            if self._told:
                log.info("what is written is committed again")
            self._since_ms, self._told = None, ""
            return
        if self._since_ms is None:
            self._since_ms = now_ms
        lasts = self.stalled_ms >= TOLD_MS or now_ms - self._since_ms >= TOLD_MS
        if reason != self._told and lasts:
            log.warning("%s", reason)
            self._told = reason

    @property
    def reason(self) -> str:
        """For operators: what it waits for, why, and what that stops; empty: nothing."""
        if not self.names:
            stalls = f"a sync of the disk here takes more than {TOLD_MS / 1000:g} s"
            return f"nothing is committed: {stalls}" if self.stalled_ms >= TOLD_MS else ""
        text = f"nothing is committed: it waits for {', '.join(self.names)}"
        left = {each.name for each in self._leader.set.counted} - {*self.names}
        if len(left) < self._min:
            here = f"{len(left)} in sync {'is' if len(left) == 1 else 'are'} here"
            text += f"; min_insync is {self._min}, and {here}"
        if ANOTHER in self.names:
            text += "; `duemq replica add` makes it one"
        if not self._leader.prepared:
            # Never of one that is there: perhaps this log was put back from a copy, and has less.
            text += (
                "; nobody is answered until they have followed: one that is there says why it does"
                " not, and for one whose disk is lost a new disk does"
            )
        return text
