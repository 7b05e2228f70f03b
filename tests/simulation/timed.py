"""Histories by the clock: candidates stand when their election says so, and leaders answer reads.

    TimedWorld(seed).run(ticks)     # raises Violation

What is judged besides: whoever answers reads has seen all that is committed.  Processes stop for a
while, messages wait, the store is away; all clocks run at one rate, and are never compared.
"""

from __future__ import annotations

from tests.simulation.node import Node, Stream, Violation, lose_stream
from tests.simulation.world import Mood, World

TICK_MS = 100
CALM = Mood(lost=0.1, faults=0.0)


class TimedWorld(World):
    """Each tick every process that runs does its work, in any order."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, CALM)
        self._until: dict[str, int] = {}  # who is stopped, and when it goes on
        self._cut_until: dict[tuple[str, str], int] = {}  # messages wait: from, to
        self._away_until: dict[str, int] = {}  # who does not reach the store
        self._breaks: list[tuple[int, Stream]] = []  # when leaders notice that a stream ended
        self._hands_over = self.random.choice((0.0, 0.03))
        self._speed = self.random.choice((0.1, 0.7))  # of the store
        self._slowness = self.random.choice((0.0, 0.95))  # of reads
        for node in self.nodes.values():
            node.on_break = self._on_break
        self._served = 0

    def heal(self) -> None:
        for node in self.nodes.values():
            node.on_break = lose_stream
            if node.up and node.handing_over:
                node.reopen(self.now_ms)  # nobody relieved it in time: it stands like any other
        super().heal()

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_ms += TICK_MS
            self._disturb()
            self._notice_breaks()
            for node in self.random.sample(list(self.nodes.values()), len(self.nodes)):
                if node.up and not self._is_stopped(node):
                    self._work(node)
            for stream in list(self.streams.values()):
                self._deliver_some(stream)
            self._check()
            self._check_reads()
        self.counts["served"] = self._served

    def _on_break(self, stream: Stream) -> None:
        notice_ms = self.now_ms + self.random.choice((0, 300, 3_000))
        self._breaks.append((notice_ms, stream))

    def _notice_breaks(self) -> None:
        due = [each for each in self._breaks if each[0] <= self.now_ms]
        self._breaks = [each for each in self._breaks if each[0] > self.now_ms]
        for _, stream in due:
            lose_stream(stream)

    def _disturb(self) -> None:
        random = self.random
        node = random.choice(list(self.nodes.values()))
        what = random.random()
        if not node.up:
            if what < 0.1:
                node.start(self.now_ms)
        elif what < 0.002:
            random.choice((node.kill, node.cut_power))()
        elif what < 0.005:
            self._until[node.name] = self.now_ms + random.choice((300, 2_000, 9_000))
        elif what < 0.010:
            way = (node.name, random.choice(list(self.nodes)))
            self._cut_until[way] = self.now_ms + random.choice((300, 2_000, 9_000))
        elif what < 0.025:
            away = [node] if random.random() < 0.8 else self.nodes.values()
            wait_ms = random.choice((300, 2_000, 9_000, 9_000))
            self._away_until |= {each.name: self.now_ms + wait_ms for each in away}
        elif what < 0.028:
            self._isolate(node)
        elif what < 0.032 and node.leader is not None and node.leader.prepared:
            node.hand_over(self.now_ms)
            self.counts["hand-overs"] += 1

    def _isolate(self, node: Node) -> None:
        """It goes on, and reaches nobody."""
        until_ms = self.now_ms + self.random.choice((2_000, 9_000, 20_000))
        self._away_until[node.name] = until_ms
        for other in self.nodes:
            self._cut_until[node.name, other] = self._cut_until[other, node.name] = until_ms

    def _is_stopped(self, node: Node) -> bool:
        return self.now_ms < self._until.get(node.name, 0)

    def _work(self, node: Node) -> None:
        leader = node.leader
        if leader is not None and leader.deposed:
            return node.reopen(self.now_ms)
        reaches_store = self.now_ms >= self._away_until.get(node.name, 0)
        if reaches_store:
            self._use_store(node)
        if leader is not None:
            if node.handing_over:
                node.hand_over(self.now_ms)
            elif leader.prepared:
                self._append(node)
            if reaches_store:
                node.change_set(self.now_ms)
            elif (
                self.random.random() < self._hands_over
            ):  # the set cannot change: another shall lead
                node.hand_over(self.now_ms)
                self.counts["hand-overs"] += 1
        elif node.stream is None and reaches_store:
            node.follow(self.nodes)
        while node.log.pending_bytes:
            node.write()
        node.sync()
        node.answer()
        for stream in list(self.streams.values()):
            if stream.leader is node and self.random.random() < 0.7:
                node.send(stream, self.now_ms)
        return None

    def _use_store(self, node: Node) -> None:
        while self.store.under_way and self.random.random() < self._speed:
            self.store.apply_one()
        if node.leader is not None:
            if not node.handing_over:
                self.store.renew(node.me)
                node.leader.renewed(self.now_ms)
            node.ask_for(node.leader.read(self.store.read()))
        else:
            node.announce()
            node.look_up()
            node.vote(self.now_ms, slowness=self._slowness)

    def _deliver_some(self, stream: Stream) -> None:
        leader, follower = stream.leader, stream.follower
        ways = (
            (stream.to_leader, follower, leader, leader.deliver_to_leader),
            (stream.to_follower, leader, follower, follower.deliver_to_follower),
        )
        for messages, source, target, deliver in ways:
            while messages and stream.number in self.streams and self._passes(source, target):
                deliver(stream, self.now_ms)

    def _passes(self, source: Node, target: Node) -> bool:
        cut_until = self._cut_until.get((source.name, target.name), 0)
        return self.now_ms >= cut_until and not self._is_stopped(target)

    def _check_reads(self) -> None:
        """Nobody serves while a later leader has begun to commit."""
        leading = [node.leader for node in self.nodes.values() if node.up and node.leader]
        newest = max((each.epoch for each in leading if each.prepared), default=0)
        for node in self.nodes.values():
            leader = node.leader if node.up and not self._is_stopped(node) else None
            if leader is not None and leader.prepared and leader.serves(self.now_ms):
                self._served += 1
                if leader.epoch < newest:
                    raise Violation(f"{node.me} serves epoch {leader.epoch}, {newest} has begun")
