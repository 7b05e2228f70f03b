"""A leader: what its followers have, what is committed, who is in sync.  Pure.

Owned by: the replica that leads; one object an epoch.  It is told what happened, and says what is
to be done: `high_watermark`, chunks to send, compare-and-sets to make, `deposed`.

Why this is safe without clocks: a stale leader can commit only with all of its set; its successor
was in that set and follows it no more; it cannot change the set, because the record's version
moved.
"""

from __future__ import annotations

from collections.abc import Iterable

from duemq_server.replication.protocol.epochs import Epochs, common_end
from duemq_server.replication.protocol.followers import FollowerProgress, refusal, rival
from duemq_server.replication.protocol.in_sync import InSyncSet, InSyncState, Swap
from duemq_server.replication.protocol.messages import (
    CHUNK_BYTES_MAX,
    UNANSWERED_BYTES_MAX,
    Answer,
    Chunk,
    Hello,
    NeedsSnapshot,
    Reason,
    Refusal,
    Welcome,
)
from duemq_server.replication.protocol.record import (
    HeldRecord,
    MemberChange,
    Record,
    Refused,
    ReplicaId,
)
from duemq_server.replication.protocol.times import Times


class Leader:
    """Leads one epoch.  Positions are bytes of the log, times ms of a steady clock."""

    def __init__(
        self,
        me: ReplicaId,
        found: HeldRecord,
        epochs: Epochs,
        *,
        start: int,
        committed: int,
        min_insync: int,
        now_ms: int,
        times: Times | None = None,
        log_start: int = 0,
    ) -> None:
        """`found`: the record as its takeover left it; `start`: where its EPOCH entry lies;
        `committed`: what it knows to be, from when it followed.

        Raises Refused if the takeover was overtaken: the log has entries of a later epoch.
        """
        if found.record.epoch <= epochs.last:
            raise Refused(f"epoch {epochs.last} has begun")
        epochs.note(found.record.epoch, start)
        self.me = me
        self.epoch = found.record.epoch
        self.set = InSyncSet(found.version, found.record, min_insync)
        self.epochs = epochs
        self.start = start
        self.high_watermark = committed
        self.log_start = log_start
        self.durable = 0
        self._times = times or Times()
        self._min = min_insync
        self._began_ms = now_ms
        self._higher_epoch = False
        self._renewed_ms: int | None = None
        self._progress: dict[int, FollowerProgress] = {}  # by stream
        self._durable: dict[ReplicaId, int] = {}  # what disks have, also of streams that broke
        self._broke: set[ReplicaId] = set()
        self.resigned = False
        """It hands over: it accepts nothing and answers no reads."""

    @property
    def record(self) -> Record:
        """As last known."""
        return self.set.record

    @property
    def deposed(self) -> bool:
        """Somebody else leads, or will: stop, open the store again, follow."""
        return self.set.deposed or self._higher_epoch

    def is_over(self) -> bool:
        """Whether somebody else leads, or is about to."""
        return self.deposed or self.resigned

    @property
    def prepared(self) -> bool:
        """Its EPOCH entry is committed: what it was left is, too, and it may accept."""
        return self.high_watermark > self.start

    # -- rule 1: what is committed ----------------------------------------

    def synced(self, position: int) -> None:
        """The leader's own log is durable up to there."""
        self.durable = max(self.durable, position)
        self._advance()

    def answered(self, stream: int, answer: Answer, end: int, now_ms: int) -> None:
        """A follower said what it has; `end` is the leader's own."""
        progress = self._progress.get(stream)
        if progress is None or (answer.epoch, answer.replica) != (self.epoch, progress.replica):
            return
        progress.heard_ms = max(progress.heard_ms, answer.heard_ms)
        progress.takes = progress.takes or answer.heard_ms > 0
        progress.short_of_space = answer.short_of_space
        # Nobody has what was not sent to it.
        durable = min(answer.durable, progress.next)
        progress.durable = max(progress.durable or 0, durable)
        progress.note_lag(end, now_ms)
        self._durable[progress.replica] = progress.durable
        self._advance()

    def _advance(self) -> None:
        """Rule 1: a position is committed when every replica of the in-sync set has it behind an
        fdatasync, and the set has at least `min_insync`.  Committed is what is answered, shown to
        consumers and timer shards, applied by followers, put in checkpoints."""
        if self.set.enough:
            self.high_watermark = max(self.high_watermark, self._on_all_disks())

    def _on_all_disks(self) -> int:
        return min(self._on_disk(each) for each in self.set.counted)

    def _on_disk(self, replica: ReplicaId) -> int:
        return self.durable if replica == self.me else self._durable.get(replica, 0)

    # -- followers ----------------------------------------------------------

    def hello(
        self, stream: int, hello: Hello, end: int, now_ms: int
    ) -> Welcome | NeedsSnapshot | Refusal:
        """Somebody wants to follow.  `end` is of the leader's log."""
        refused = refusal(hello, self.record, self.epoch, deposed=self.deposed)
        if refused is not None:
            reason, text = refused
            if reason is Reason.NOT_LEADING and hello.epoch > self.epoch:
                self._higher_epoch = True
            return self._refusal(reason, text)
        keep = common_end(hello.epochs, hello.end, self.epochs.begins, end)
        if hello.replica in self.set.counted and keep < self.high_watermark:
            return self._refusal(
                Reason.LOST,
                f"{hello.replica} is in sync and has {keep} bytes in common with the leader, of"
                f" {self.high_watermark} that are committed: its disk lost data, or was put back"
                " from a copy; start it with an empty directory, and it gets everything anew",
            )
        if keep < max(self.log_start, hello.start):
            return NeedsSnapshot(self.epoch, self.me, self.log_start)
        alive = [
            each
            for each in self._progress.values()
            if now_ms - each.heard_ms < self._times.heard_ms
        ]
        if named := rival(hello, self.me, alive):
            return self._refusal(Reason.STRANGER, named)
        for other, progress in self.followers.items():
            if progress.replica.name == hello.replica.name:
                self.broke(other)
        self._progress[stream] = FollowerProgress(
            hello.replica,
            hello.address,
            next=keep,
            began=keep,
            durable=None,
            heard_ms=now_ms - self._times.heard_ms,
            at_end_ms=now_ms,
            mark=end,
            mark_ms=now_ms,
        )
        self._durable.pop(hello.replica, None)
        self._broke.discard(hello.replica)
        return Welcome(self.epoch, self.me, keep)

    def _refusal(self, reason: Reason, text: str) -> Refusal:
        return Refusal(self.epoch, self.me, reason, text)

    def broke(self, stream: int) -> None:
        """A follower's stream ended."""
        progress = self._progress.pop(stream, None)
        if progress is not None:
            self._broke.add(progress.replica)

    def to_read(self, stream: int, written: int) -> tuple[int, int] | None:
        """What to send next: a position, and at most how many bytes.  None: nothing now."""
        progress = self._progress.get(stream)
        if progress is None or progress.next >= written:
            return None
        answered = max(progress.began, progress.durable or 0)
        room = UNANSWERED_BYTES_MAX - (progress.next - answered)
        if room <= 0:
            return None
        return progress.next, min(CHUNK_BYTES_MAX, room, written - progress.next)

    def chunk(
        self, stream: int, data: bytes | memoryview, now_ms: int, *, take_over: bool = False
    ) -> Chunk:
        """What was read, as a message; without data, a heartbeat."""
        progress = self._progress[stream]
        position = progress.next
        progress.next += len(data)
        return Chunk(
            self.epoch,
            self.me,
            position,
            data,
            self.high_watermark,
            self.log_start,
            now_ms,
            take_over,
        )

    @property
    def followers(self) -> dict[int, FollowerProgress]:
        """Open streams."""
        return dict(self._progress)

    # -- rule 3: the set ----------------------------------------------------

    def change(self, now_ms: int) -> Swap | None:
        """The next change of the set, if one is due and none is under way.

        Rule 3: a leader admits a replica that follows in its epoch, does not lag, and is durable
        to the high watermark and beyond the epoch's first entry.  It removes one whose stream
        broke, or that lags for `lag_max_ms`, but never goes below `min_insync` of its own will: the
        high watermark cannot move without the absent one, so who is left in stays electable.  A
        dead member may be exchanged for a new one in one compare-and-set.
        """
        if self.deposed or self.set.state is not InSyncState.SETTLED:
            return None
        current = self.record.in_sync
        wanted = current | frozenset(self._admissible(now_ms))
        # A successor leaves its stream to stand: it must not leave the set by that.
        for each in () if self.resigned else sorted(self._gone(now_ms)):
            if len(wanted) > self._min:
                wanted -= {each}
        return self.set.propose(wanted) if wanted != current else None

    def _admissible(self, now_ms: int) -> Iterable[ReplicaId]:
        for each in self._progress.values():
            if each.replica in self.record.in_sync or self._lags(each, now_ms):
                continue  # who is silent has all for as long as nothing is written
            if self._is_ready(each):
                yield each.replica

    def _lags(self, progress: FollowerProgress, now_ms: int) -> bool:
        return now_ms - progress.at_end_ms > self._times.lag_max_ms

    def _is_ready(self, progress: FollowerProgress) -> bool:
        durable = progress.durable or 0
        return durable >= self.high_watermark and durable > self.start

    def _gone(self, now_ms: int) -> Iterable[ReplicaId]:
        lag_max_ms = self._times.lag_max_ms
        following = {each.replica: each for each in self._progress.values()}
        names = {each.name for each in following}
        for replica in self.record.in_sync - {self.me}:
            progress = following.get(replica)
            if progress is None and replica.name in names:
                yield replica  # its name has another disk
            elif progress is not None:
                if self._lags(progress, now_ms):
                    yield replica
            elif replica in self._broke or now_ms - self._began_ms > lag_max_ms:
                yield replica

    def change_members(self, change: MemberChange) -> Swap | None:
        """An operator's change of who may take part, by rules 2 and 3 like any other.

        None: not now, for another change is under way, or it is done already.  Raises Refused.
        """
        if self.deposed or self.resigned:
            raise Refused("another one is about to lead")
        if self.set.state is not InSyncState.SETTLED or change.is_done(self.record):
            return None
        return self.set.propose_members(change)

    def won(self, number: int, version: str) -> None:
        """A change was made."""
        self.set.won(number, version)
        self._leave_strangers()
        self._advance()

    def _leave_strangers(self) -> None:
        """Who is no member any more gets nothing: its stream ends."""
        for stream, progress in self.followers.items():
            if progress.replica.name not in self.record.members:
                self.broke(stream)

    def lost(self, number: int, found: HeldRecord | None) -> Swap | None:
        """A change was not made; what to try next."""
        return self.set.lost(number, found)

    def unanswered(self, number: int) -> None:
        """No answer came: read the record, and tell `read`."""
        self.set.unanswered(number)

    def read(self, found: HeldRecord | None) -> Swap | None:
        """What the store holds, however that became known; what to try next."""
        return self.set.read(found)

    def resign(self) -> None:
        """The first step of a hand-over.

        Then: wait for a `successor`, tell it by a chunk with `take_over`.
        """
        self.resigned = True

    def successor(self, end: int, name: str = "") -> ReplicaId | None:
        """Who may be asked to take over: in sync, following, and durable to the leader's end.

        With a name, only that replica; else one that has space, if there is any.
        """
        ready = [
            (each.short_of_space, each.replica)
            for each in self._progress.values()
            if each.replica in self.record.in_sync
            and (each.durable or 0) >= end
            and name in ("", each.replica.name)
        ]
        settled = self.set.state is InSyncState.SETTLED and self.high_watermark >= end
        return min(ready)[1] if ready and settled else None

    def may_relieve(self, *, with_space: bool) -> bool:
        """Whether any other one could lead, or would accept something then, too."""
        return any(
            each.replica in self.record.in_sync and not (with_space and each.short_of_space)
            for each in self._progress.values()
        )

    def is_outrun(self) -> bool:
        """Whether as many as must have it hold on their disks what this one's has not taken yet.

        Fewer would wait for this one as it does, and until then answer no reads, either.
        """
        ahead = [
            each.replica
            for each in self._progress.values()
            if each.replica in self.record.in_sync and (each.durable or 0) > self.durable
        ]
        return len(ahead) >= self._min

    # -- reads ----------------------------------------------------------------

    def renewed(self, began_ms: int) -> None:
        """The lease was renewed by a call that began then."""
        self._renewed_ms = began_ms

    def serves(self, now_ms: int) -> bool:
        """Whether it may answer reads that do not pass through the log.

        While its lease is valid, counted from before the renewal was sent, or while all in sync
        answered a heartbeat that was sent in the last second: so a store that is away stops
        nothing while the group is whole, and a set of one goes on alone.  Who heard a heartbeat
        does not stand for that second.
        """
        if self.deposed or self.resigned:
            return False
        renewed_ms = self._renewed_ms
        if renewed_ms is not None and now_ms - renewed_ms < self._times.serve_ms:
            return True
        heard = {each.replica: each.heard_ms for each in self._progress.values()}
        since_ms = now_ms - self._times.heard_ms
        return all(heard.get(each, since_ms) > since_ms for each in self.set.counted - {self.me})
