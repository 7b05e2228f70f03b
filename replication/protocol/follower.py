"""A follower: it makes its log the leader's, byte by byte.  Pure.

Owned by: the replica that follows; one object a stream.  It is told what came and what is durable,
and says what is to be done with the log.

Rule 6: a follower follows whom the record names, after truncating to the end of what both logs
have in common; never a lower epoch than its log's last.  Nothing committed is ever truncated: it
refuses to go below what it knows to be committed, which is a case for an operator.
"""

from __future__ import annotations

from dataclasses import dataclass

from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.messages import (
    ANOTHER_LEADER,
    Answer,
    Chunk,
    Hello,
    NeedsSnapshot,
    Welcome,
)
from duemq_server.replication.protocol.record import (
    LOG_VERSION,
    Record,
    Refused,
    ReplicaId,
    check_readable,
)
from duemq_server.storage import record
from duemq_server.storage.replicas import epoch

EITHER_LOST = (
    "one of both lost data: if the leader's disk did, or was put back from a copy, stop that one;"
    " else start this one with an empty directory"
)


class StreamBroken(Exception):
    """The stream is of no use any more: say hello again."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Verified entries for the log's end."""

    position: int
    data: memoryview
    end: int


class Follower:
    """Follows one leader in one epoch."""

    def __init__(
        self,
        me: ReplicaId,
        followed: Record,
        epochs: Epochs,
        *,
        start: int,
        end: int,
        durable: int,
        committed: int,
        former_to: int | None = None,
    ) -> None:
        """`start`, `end` and `durable` of its log; `committed`: what it knows to be.

        `former_to`: up to where a history has taken effect here that a decision has replaced,
        which accepted a loss.

        Raises Refused for a record of a lower epoch than the log's last, or a log that this release
        does not read.
        """
        check_readable(followed)
        if followed.leader is None or followed.leader == me:
            raise Refused("nobody leads whom it could follow")
        if followed.epoch < epochs.last:
            raise Refused(
                f"the record is of epoch {followed.epoch}, the log of {epochs.last}: the store was"
                " set back; `duemq replica adopt` the replica that has the most"
            )
        epochs.truncate(end)  # what came on another stream may not have come to the log
        self.me = me
        self.record = followed
        self.leader = followed.leader
        self.epochs = epochs
        self.end = end
        self.durable = durable
        self.committed = committed
        """What it knows to be committed and has in its log."""
        self.short_of_space = False
        """If it led, it would accept nothing."""
        self.asked_to_lead = False
        """The leader hands over."""
        self._former_to = former_to
        self._start = start
        self._leaders_committed = committed
        self._heard_ms = 0
        self._welcome = False

    def hello(self) -> Hello:
        """The first message of the stream."""
        return Hello(
            self.record.group,
            self.record.store_id,
            self.me,
            self.record.epoch,
            self.epochs.begins,
            self._start,
            self.end,
            LOG_VERSION,
        )

    def welcome(self, welcome: Welcome) -> int | None:
        """Where to truncate the log, durably, before anything is taken; None: nowhere.

        Then `truncated` is called: what a truncation that failed has left is still this log's.
        Raises Refused rather than give up what is committed, StreamBroken.
        """
        self._check_sender(welcome.epoch, welcome.leader)
        if welcome.truncate_to < self.committed:
            raise Refused(
                f"{self.leader} has {welcome.truncate_to} bytes in common with this log, of which"
                f" {self.committed} are committed: {EITHER_LOST}"
            )
        if welcome.truncate_to > self.end:
            raise StreamBroken(f"the log ends at {self.end}, before {welcome.truncate_to}")
        if welcome.truncate_to < self.end:
            return welcome.truncate_to
        self._welcome = True
        return None

    def needs_snapshot(self, greeting: Welcome | NeedsSnapshot) -> bool:
        """Whether one is to be installed in this log's place; else it goes on by the `welcome`.

        What is committed here lies before the log of a leader that has it, too, or it would go on
        with this one.  Raises Refused otherwise, StreamBroken.

        Of a former history an operator gave up what the leader lacks.  That takes a snapshot, also
        where the leader would go on with this log: no truncation undoes what has taken effect.
        """
        self._check_sender(greeting.epoch, greeting.leader)
        if isinstance(greeting, Welcome):
            return self._former_to is not None and greeting.truncate_to < self._former_to
        if greeting.log_start <= self.committed and self._former_to is None:
            raise Refused(
                f"the log of {self.leader}, from {greeting.log_start} on, lacks what is committed"
                f" here, up to {self.committed}: {EITHER_LOST}"
            )
        return True

    def truncated(self, position: int) -> None:
        """The log ends there now, durably, as the welcome said."""
        self.end = position
        self.durable = min(self.durable, position)
        self.epochs.truncate(position)
        self._welcome = True

    def _check_sender(self, of_epoch: int, leader: ReplicaId) -> None:
        if (of_epoch, leader) != (self.record.epoch, self.leader):
            raise StreamBroken(f"epoch {of_epoch} of {leader} is not what the record says")

    def chunk(self, chunk: Chunk) -> Extend | None:
        """What to extend the log by; None for a heartbeat.  Raises StreamBroken."""
        self._check_sender(chunk.epoch, chunk.leader)
        if not self._welcome or chunk.position != self.end:
            raise StreamBroken(f"the log ends at {self.end}, the chunk begins at {chunk.position}")
        extend = self._verified(chunk) if len(chunk.data) else None
        self._leaders_committed = max(self._leaders_committed, chunk.committed)
        self.committed = max(self.committed, min(chunk.committed, self.end))
        self._heard_ms = chunk.sent_ms
        self.asked_to_lead = self.asked_to_lead or chunk.take_over
        return extend

    def _verified(self, chunk: Chunk) -> Extend:
        end = chunk.position
        begins = []
        try:
            for entry in record.split(chunk.data):
                if entry.position != end:
                    raise StreamBroken(f"an entry of position {entry.position} came at {end}")
                if entry.kind == epoch.KIND:
                    begins.append((epoch.decode(entry.body).epoch, entry.position))
                end = entry.end
            for begin in begins:
                self.epochs.note(*begin)
        except ValueError as error:  # InvalidEntryError, or an epoch that does not follow
            self.epochs.truncate(chunk.position)
            raise StreamBroken(
                f"what came is not whole: {error}; if that stays so, the leader's log is damaged at"
                f" {chunk.position} or behind: {ANOTHER_LEADER}"
            ) from error
        self.end = end
        return Extend(chunk.position, memoryview(chunk.data).toreadonly(), end)

    def not_taken(self, extend: Extend) -> None:
        """The log did not take it, so it is not here: the stream is of no use any more."""
        self.end = extend.position
        self.committed = min(self.committed, self.end)
        self.epochs.truncate(self.end)

    def synced(self, position: int) -> None:
        """The log is durable up to there."""
        self.durable = min(max(self.durable, position), self.end)

    @property
    def covers_claims(self) -> bool:
        """The disk holds what the leader calls committed, so what entries claim is true here.

        The log's `caught_up` comes before an answer then: so a log that is still catching up is in
        no set, and its lenient recovery gives up nothing that counts.
        """
        return self.durable >= self._leaders_committed

    @property
    def applicable(self) -> int:
        """Up to where entries take effect: committed, and on this disk; never undone."""
        return min(self.committed, self.durable)

    def answer(self) -> Answer | None:
        """What is behind an fdatasync here.

        None before the welcome: the log may hold more then than both have in common.
        """
        if not self._welcome:
            return None
        return Answer(self.record.epoch, self.me, self.durable, self._heard_ms, self.short_of_space)
