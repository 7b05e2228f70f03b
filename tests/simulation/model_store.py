"""A store of one record: linearizable, slow, and forgetful of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId, decode, encode


@dataclass
class Request:
    """A compare-and-set under way; `answer(version, found)`, or None where nobody waits."""

    version: str | None
    record: Record
    answer: Callable[[str | None, HeldRecord | None], None] | None
    gave_up: Callable[[], None] | None


class ModelStore:
    """`lost`: the share of answers that nobody gets."""

    def __init__(self, random: Random, lost: float) -> None:
        self.found: HeldRecord | None = None
        self.under_way: list[Request] = []
        self.lost_answers = 0
        self._random = random
        self._lost = lost
        self._versions = 0
        self._renewals: Counter[ReplicaId] = Counter()

    @property
    def record(self) -> Record | None:
        return self.found.record if self.found else None

    def read(self) -> HeldRecord | None:
        if self.found is None or self.found.record.leader is None:
            return self.found
        renewals = self._renewals[self.found.record.leader]
        return replace(self.found, lease=str(renewals) if renewals else None)

    def renew(self, leader: ReplicaId) -> None:
        """A lease ends by nobody's word: who waits sees that it stands still."""
        self._renewals[leader] += 1

    def lose_record(self) -> None:
        """Somebody deletes it."""
        self.found = None

    def ask(self, request: Request) -> None:
        self.under_way.append(request)

    def apply_one(self, *, healthy: bool = False) -> None:
        """Any that is under way, in any order."""
        request = self.under_way.pop(0 if healthy else self._random.randrange(len(self.under_way)))
        done = request.version == (self.found.version if self.found else None)
        if done:
            self._versions += 1
            record = decode(encode(request.record))
            assert record == request.record
            self.found = HeldRecord(f"v{self._versions}", record)
        if not healthy and self._random.random() < self._lost:
            self.lost_answers += 1
            if request.gave_up is not None:
                request.gave_up()
        elif request.answer is not None:
            version = self.found.version if done and self.found else None
            request.answer(version, self.found)

    def give_up_one(self) -> None:
        """Who asked waits no longer; it may be applied yet."""
        request = self._random.choice(self.under_way)
        if request.gave_up is not None:
            request.gave_up()
            self.lost_answers += 1
        request.answer = request.gave_up = None
