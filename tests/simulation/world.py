"""Random histories of a group of replicas, judged after every step.

    world = World(seed)
    world.run(steps)        # raises Violation
    world.heal()            # everything is well again: raises Violation if nothing comes of it

Anything may happen at any time: takeovers need no clock, for safety rests on none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from duemq_server.replication.protocol.record import MemberChange
from tests.simulation.model_store import ModelStore
from tests.simulation.node import Node, Stream, Violation

TICK_MS = 250
TICKS_TO_RECOVER = 120


@dataclass(frozen=True)
class Mood:
    """How badly a history goes."""

    lost: float = 0.25
    """Share of the store's answers that get lost."""
    impatience: float = 0.02
    """How often nobody waits for an answer, and what was asked for is done later."""
    faults: float = 0.02
    """How often a process dies; a disk does a fifth as often."""

    deletions: float = 0.0
    """How often somebody deletes the record."""
    members: float = 0.0
    """How often an operator adds a member, or removes one."""
    refused: float = 0.0
    """Share of chunks for which a follower's log has no room."""


SLOW_STORE = Mood(lost=0.3, impatience=0.5, faults=0.005)
OTHER_MEMBERS = Mood(members=0.1)
FULL_LOGS = Mood(refused=0.2)
MOODS = (Mood(), Mood(faults=0.05), SLOW_STORE, Mood(deletions=0.002), OTHER_MEMBERS, FULL_LOGS)


class World:
    """Owns all there is; `mood`: how badly it goes, else the seed says."""

    def __init__(self, seed: int, mood: Mood | None = None) -> None:
        self.random = random = Random(seed)
        self.mood = mood = mood or random.choice(MOODS)
        names = ["a", "b", "c"][: random.choice((2, 3, 3))]
        self.min_insync = random.choice((1, 2))
        self.store = ModelStore(random, mood.lost)
        self.streams: dict[int, Stream] = {}
        self.nodes = {
            name: Node(name, self.store, self.streams, frozenset(names), self.min_insync, random)
            for name in names
        }
        self.committed = bytearray()
        self.now_ms = 0
        self.sent = 0
        self.counts: Counter[str] = Counter()
        for node in self.nodes.values():
            node.on_commit = self._on_commit
            node.refuses = mood.refused
            node.start(0)
        if random.random() < 0.7:  # else it is founded while anything may happen
            for node in self.nodes.values():
                node.announce()
                self.store.apply_one(healthy=True)

    # -- what is judged

    def _on_commit(self, node: Node) -> None:
        """A leader calls more committed: it goes on from what was committed before."""
        if node.committed > node.log.end_position:
            raise Violation(f"{node.me}: the high watermark is beyond the log")
        self._compare(node)
        known = len(self.committed)
        if node.committed > known:
            self.committed += _read(node, known, node.committed)
            self.counts["commits"] += 1
        self._check()

    def _compare(self, node: Node) -> None:
        """Its log holds the committed history, as far as it should by its own word."""
        end = min(node.committed, len(self.committed))
        if node.verified < end:
            if _read(node, node.verified, end) != self.committed[node.verified : end]:
                raise Violation(f"two histories: {node.me} differs before {end}")
            node.verified = end

    def _check(self) -> None:
        record = self.store.record
        if record is None or record.epoch == 0:
            return  # gone, or being founded: nobody counts as in sync
        if record.leader is not None and record.leader not in record.in_sync:
            raise Violation(f"{record.leader} leads and is not in sync")
        if not {each.name for each in record.in_sync} <= record.members:
            raise Violation(f"{record.in_sync} are in sync, and members {record.members}")
        for node in self.nodes.values():
            if node.up and node.me in record.in_sync:
                self._check_in_sync(node)

    def _check_in_sync(self, node: Node) -> None:
        """All that was committed is on the disk of each in the set."""
        end = len(self.committed)
        if node.log.durable_position < end:
            raise Violation(f"{node.me} is in sync and has not all that is committed on its disk")
        if node.verified < end:
            if _read(node, node.verified, end) != self.committed[node.verified : end]:
                raise Violation(f"{node.me} is in sync and has another history")
            node.verified = end

    # -- what happens

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now_ms += self.random.choice((1, 20, 200))
            self.step()
            self._check()

    def step(self) -> None:
        random, mood = self.random, self.mood
        node = random.choice(list(self.nodes.values()))
        what = random.random()
        if not node.up:
            if what < 0.3:
                node.start(self.now_ms)
        elif random.random() < mood.faults:
            self.counts["crashes"] += 1
            random.choice((node.kill, node.cut_power))()
        elif random.random() < mood.faults / 5:
            self._lose_disk(node)
        elif random.random() < mood.deletions:
            self.store.lose_record()
            self.counts["records lost"] += 1
        elif what < 0.025:
            if random.random() < 0.5:
                node.leave()
            node.stand(self.now_ms)
        elif what < 0.40 and self.streams:
            self._deliver(random.choice(list(self.streams.values())))
        elif what < 0.48 and self.store.under_way:
            if random.random() < mood.impatience:
                self.store.give_up_one()
            else:
                self.store.apply_one()
        elif node.leader is not None:
            self._lead(node, random.random())
        else:
            self._follow(node, random.random())

    def _lose_disk(self, node: Node) -> None:
        """Never the last in-sync one: what only that has goes with it, whatever the protocol."""
        if self.counts["disks"] > 2 or not self._others_have_all(node):
            return
        self.counts["disks"] += 1
        node.empty_directory()

    def _others_have_all(self, node: Node) -> bool:
        sets = [self.store.record, *(each.record for each in self.store.under_way)]
        others = [
            each
            for each in self.nodes.values()
            if each is not node and each.up and each.log.durable_position >= len(self.committed)
        ]
        return all(
            record is not None and any(each.me in record.in_sync for each in others)
            for record in sets
        )

    def _deliver(self, stream: Stream) -> None:
        if self.random.random() < 0.04:
            stream.leader.hang_up(stream)
        elif stream.to_leader and (self.random.random() < 0.5 or not stream.to_follower):
            stream.leader.deliver_to_leader(stream, self.now_ms)
        elif stream.to_follower:
            stream.follower.deliver_to_follower(stream, self.now_ms)

    def _lead(self, node: Node, what: float) -> None:
        leader = node.leader
        assert leader is not None
        if leader.deposed:
            node.reopen(self.now_ms)
        elif self.mood.members and self.random.random() < self.mood.members:
            self._change_members(node, leader.record.members)
        elif what < 0.25:
            self._append(node)
        elif what < 0.45:
            node.write()
        elif what < 0.60:
            node.sync()
        elif what < 0.85:
            for stream in list(self.streams.values()):
                if stream.leader is node and self.random.random() < 0.7:
                    node.send(stream, self.now_ms)
        elif what < 0.98:
            node.change_set(self.now_ms)
        else:
            node.ask_for(leader.read(self.store.read()))

    def _change_members(self, node: Node, members: frozenset[str]) -> None:
        name = self.random.choice(list(self.nodes))
        self.counts["members"] += 1
        accepted = self.random.random() < 0.3
        node.change_members(MemberChange(name, name not in members, accepted))

    def _append(self, node: Node) -> None:
        self.sent += 1
        size = self.random.choice((8, 8, 40, 600))
        node.append(self.sent.to_bytes(8, "little") * (size // 8))

    def _follow(self, node: Node, what: float) -> None:
        if node.stream is None:
            node.announce() if what < 0.2 else node.follow(self.nodes)
        elif what < 0.35:
            node.write()
        elif what < 0.60:
            node.sync()
        elif what < 0.95:
            node.answer()
        else:
            node.leave()

    # -- when all is well

    def heal(self) -> None:
        """The store answers, nothing breaks, and enough replicas are up: then all goes on."""
        self._settle_store()
        for node in self.nodes.values():
            node.refuses = 0.0
            if not node.up:
                node.start(self.now_ms)
        record = self.store.record
        if (record is None or record.epoch == 0) and any(
            node.log.end_position for node in self.nodes.values()
        ):
            self._adopt()
        self._leave_some_down()
        up = [node for node in self.nodes.values() if node.up]
        goal = len(self.committed) + 1_000
        for _ in range(TICKS_TO_RECOVER):
            self._tick(up)
            self._check()
            if len(self.committed) >= goal and self._all_in_sync(up):
                return
        raise Violation(f"no progress: {len(self.committed)} of {goal}, {self.store.record}")

    def _settle_store(self) -> None:
        while self.store.under_way:
            self.store.apply_one(healthy=True)

    def _adopt(self) -> None:
        """Rule 7: nobody leads any more; the log of the last epoch that is the longest has all."""
        for node in self.nodes.values():
            node.reopen(self.now_ms)
        best = max(self.nodes.values(), key=lambda each: (each.epochs.last, each.log.end_position))
        best.adopt()
        self._settle_store()
        self.counts["adopted"] += 1

    def _leave_some_down(self) -> None:
        """As many as may be: who can take over, and `min_insync` with it, stay."""
        for node in self.nodes.values():
            up = [each for each in self.nodes.values() if each.up and each is not node]
            record = self.store.record
            if record is None or record.epoch == 0:
                return
            enough = len(up) >= self.min_insync
            electable = any(each.me in record.in_sync for each in up)
            if enough and electable and self.random.random() < 0.3:
                self.counts["left_down"] += 1
                node.kill()

    def _all_in_sync(self, up: list[Node]) -> bool:
        record = self.store.record
        return record is not None and all(node.me in record.in_sync for node in up)

    def _tick(self, up: list[Node]) -> None:
        self.now_ms += TICK_MS
        for node in up:
            if node.leader is not None and node.leader.deposed:
                node.reopen(self.now_ms)
            if node.leader is not None:
                self.store.renew(node.me)
                self._append(node)
                node.change_set(self.now_ms)
                node.ask_for(node.leader.read(self.store.read()))
                for name in sorted(self.nodes.keys() - node.leader.record.members):
                    node.change_members(MemberChange(name, joins=True))
            else:
                node.announce()
                node.vote(self.now_ms)
                if node.stream is None and node.leader is None:
                    node.follow(self.nodes)
            while node.log.pending_bytes:
                node.write()
            node.sync()
        self._settle_store()
        for stream in list(self.streams.values()):
            self._deliver_all(stream)

    def _deliver_all(self, stream: Stream) -> None:
        for _ in range(20):
            if stream.number not in self.streams:
                return
            stream.leader.send(stream, self.now_ms) if stream.leader.up else None
            while stream.to_follower:
                stream.follower.deliver_to_follower(stream, self.now_ms)
            while stream.follower.up and stream.follower.log.pending_bytes:
                stream.follower.write()
            stream.follower.sync()
            stream.follower.answer()
            while stream.to_leader:
                stream.leader.deliver_to_leader(stream, self.now_ms)


def _read(node: Node, first: int, end: int) -> bytes:
    """Of a node's log, also what is not written yet."""
    data = bytearray()
    while first + len(data) < end:
        data += node.log.read(first + len(data), end - first - len(data))
    return bytes(data)
