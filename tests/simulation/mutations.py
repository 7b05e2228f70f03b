"""Faults that others made, or that this protocol could have: each breaks one rule of the cores.

with applied("count-old-set", monkeypatch): the simulation must find it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from duemq_server.replication.protocol import leader as leaders
from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.election import Election
from duemq_server.replication.protocol.follower import Follower
from duemq_server.replication.protocol.in_sync import InSyncSet, InSyncState
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import Answer, Welcome
from duemq_server.replication.protocol.times import Times
from duemq_server.storage.replicas import catching_up
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.simulation.node import Node

Patch = Callable[[pytest.MonkeyPatch], None]


def count_old_set(patch: pytest.MonkeyPatch) -> None:
    """While the set grows, the old one is counted alone (rocketmq#5663)."""
    patch.setattr(InSyncSet, "counted", property(lambda self: self.record.in_sync))


def count_new_set(patch: pytest.MonkeyPatch) -> None:
    """While a change is under way, the set that was asked for is counted alone."""

    def counted(self: InSyncSet) -> frozenset[records.ReplicaId]:
        return (self._asked or self).record.in_sync

    patch.setattr(InSyncSet, "counted", property(counted))


def keep_strangers(patch: pytest.MonkeyPatch) -> None:
    """Who was removed goes on to follow, and is admitted again."""
    patch.setattr(Leader, "_leave_strangers", lambda self: None)


def enough_answers(patch: pytest.MonkeyPatch) -> None:
    """`min_insync` answers commit, not those of all in the set."""

    def on_enough_disks(self: Leader) -> int:
        ends = sorted((self._on_disk(each) for each in self.set.counted), reverse=True)
        return min(self.durable, ends[min(self._min, len(ends)) - 1])

    patch.setattr(Leader, "_on_all_disks", on_enough_disks)


def answer_before_sync(patch: pytest.MonkeyPatch) -> None:
    """A follower answers what it has written, not what it has synced."""
    written = property(lambda self: self.end, lambda self, value: None)
    patch.setattr(Follower, "durable", written, raising=False)


def names_for_disks(patch: pytest.MonkeyPatch) -> None:
    """An emptied directory counts for what its predecessor promised."""
    real = Node.new_disk_id

    def once(self: Node) -> None:
        if not hasattr(self, "me"):
            real(self)

    patch.setattr(Node, "new_disk_id", once)


def truncate_without_epochs(patch: pytest.MonkeyPatch) -> None:
    """What two logs have in common is taken to be the shorter one."""
    patch.setattr(leaders, "common_end", lambda _mine, end, _theirs, their_end: min(end, their_end))


def settle_by_read(patch: pytest.MonkeyPatch) -> None:
    """After an answer that was lost, what is read is taken for what will be."""
    real = InSyncSet.read

    def read(self: InSyncSet, found: Any) -> Any:
        unknown = self.state is InSyncState.UNKNOWN
        swap = real(self, found)
        if swap is None or not unknown:
            return swap
        self.record, self._version = found.record, found.version
        self._possible, self._asked, self.state = {found.record.in_sync}, None, InSyncState.SETTLED
        return None

    patch.setattr(InSyncSet, "read", read)


def admit_early(patch: pytest.MonkeyPatch) -> None:
    """A follower is admitted before it has what is committed, and the epoch's first entry."""
    patch.setattr(Leader, "_is_ready", lambda self, progress: True)


def anybody_takes_over(patch: pytest.MonkeyPatch) -> None:
    """Who is not in sync may lead."""
    real = records.taken_over

    def taken_over(record: records.Record, me: records.ReplicaId, **known: Any) -> records.Record:
        joined = records.replace(record, in_sync=record.in_sync | {me})
        return real(joined if record.epoch else record, me, **known)

    patch.setattr(records, "taken_over", taken_over)


def claim_what_is_durable(patch: pytest.MonkeyPatch) -> None:
    """Entries claim what is durable at the leader, a false proof on any other disk."""
    patch.setattr(ReplicaLog, "_proven_position", lambda self: self.durable_position)
    patch.setattr(catching_up, "set_durably", lambda *_: None)
    patch.setattr(catching_up, "clear_durably", lambda *_: None)


def no_catching_up(patch: pytest.MonkeyPatch) -> None:
    """A log that is behind recovers as if its entries' claims were true of its disk."""
    patch.setattr(catching_up, "set_durably", lambda *_: None)
    patch.setattr(catching_up, "clear_durably", lambda *_: None)


def answer_before_welcome(patch: pytest.MonkeyPatch) -> None:
    """What a log holds beyond what both have in common counts as the leader's."""
    real = Follower.__init__

    def begin(self: Follower, *arguments: Any, **known: Any) -> None:
        real(self, *arguments, **known)
        self._welcome = True

    patch.setattr(Follower, "__init__", begin)
    believe = Leader.answered

    def answered(self: Leader, stream: int, answer: Answer, end: int, now_ms: int) -> None:
        believe(self, stream, answer, end, now_ms)
        if stream in self._progress and answer.epoch == self.epoch:
            self._progress[stream].durable = self._durable[answer.replica] = answer.durable
            self._advance()

    patch.setattr(Leader, "answered", answered)


def truncate_what_is_committed(patch: pytest.MonkeyPatch) -> None:
    """A new leader keeps its own log's end only as far as it knows it to be committed."""
    real = Node.lead

    def lead(self: Node, found: Any, now_ms: int) -> None:
        self.leave()
        while self.log.pending_bytes:
            self.write()
        boundaries = [e.position for e in self.log.entries(0)] + [self.log.end_position]
        position = max(b for b in boundaries if b <= self.committed)
        self.log.truncate(position)
        self.verified = min(self.verified, position)
        self.epochs.truncate(self.log.end_position)
        real(self, found, now_ms)

    patch.setattr(Node, "lead", lead)


def keep_what_was_refused(patch: pytest.MonkeyPatch) -> None:
    """What the log had no room for counts as if it were in it."""
    patch.setattr(Follower, "not_taken", lambda self, extend: None)


def forget_before_truncating(patch: pytest.MonkeyPatch) -> None:
    """Epochs are forgotten that the log still has where its truncation fails."""
    real = Follower.welcome

    def welcome(self: Follower, message: Welcome) -> int | None:
        position = real(self, message)
        if position is not None:
            self.epochs.truncate(position)
        return position

    patch.setattr(Follower, "welcome", welcome)


# -- of time: nothing that is stored is at risk, but what is read


def stand_while_it_is_heard(patch: pytest.MonkeyPatch) -> None:
    """A candidate does not care whether it hears the leader."""
    patch.setattr(Election, "heard", lambda self, now_ms: None)


def count_from_the_question(patch: pytest.MonkeyPatch) -> None:
    """A lease counts from when it was asked for, not from the answer."""

    def saw(self: Node, began_ms: int, ended_ms: int) -> None:
        self.election.saw(self.store.read(), began_ms)

    patch.setattr(Node, "saw", saw)


def serve_for_long(patch: pytest.MonkeyPatch) -> None:
    """A leader serves longer than its lease is."""
    long = Times(serve_ms=20_000)
    real = Leader.__init__

    def begin(self: Leader, *arguments: Any, **known: Any) -> None:
        real(self, *arguments, **known | {"times": long})

    patch.setattr(Leader, "__init__", begin)


def serve_after_resigning(patch: pytest.MonkeyPatch) -> None:
    """A leader that hands over answers reads until it hears that it was done."""
    patch.setattr(Leader, "resign", lambda self: None)


def _named(*mutations: Patch) -> dict[str, Patch]:
    return {each.__name__.replace("_", "-"): each for each in mutations}


MUTATIONS = _named(
    count_old_set,
    count_new_set,
    keep_strangers,
    enough_answers,
    answer_before_sync,
    names_for_disks,
    truncate_without_epochs,
    settle_by_read,
    admit_early,
    anybody_takes_over,
    claim_what_is_durable,
    no_catching_up,
    answer_before_welcome,
    truncate_what_is_committed,
    keep_what_was_refused,
    forget_before_truncating,
)
MUTATIONS_OF_TIME = _named(
    stand_while_it_is_heard, count_from_the_question, serve_for_long, serve_after_resigning
)
