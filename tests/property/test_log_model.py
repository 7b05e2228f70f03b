"""A log against a plain list, with kills, power cuts and full disks between the steps."""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duemq_server.storage.errors import DiskFull
from duemq_server.storage.log import SegmentedLog
from tests.crash.faulty_disk import FaultyDisk

SEGMENT_BYTES = 700


class LogMachine(RuleBasedStateMachine):
    """`there` holds (position, body) of all that was appended and may still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = FaultyDisk()
        self.there: list[tuple[int, bytes]] = []
        self.dropped_before = 0
        self.log = SegmentedLog.open("/log", self.disk, segment_bytes=SEGMENT_BYTES)
        assert list(self.log.recover()) == []

    @rule(body=st.binary(max_size=900))
    def append(self, body: bytes) -> None:
        end = self.log.end_position
        try:
            position, _ = self.log.append(1, [body[:7], body[7:]])
        except DiskFull:
            assert self.log.disk_full
            return
        assert position == end
        self.there.append((position, body))

    @rule()
    def commit(self) -> None:
        try:
            while self.log.write_pending():
                pass
            assert self.log.durable_position == self.log.end_position
        except DiskFull:
            assert self.disk.capacity_bytes is not None

    @rule()
    def write_only(self) -> None:
        try:
            self.log.write_group()
        except DiskFull:
            assert self.disk.capacity_bytes is not None

    @rule()
    def sync(self) -> None:
        assert self.log.sync() == self.log.written_position

    @rule(room=st.integers(0, 2000))
    def fill_disk(self, room: int) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes() + room

    @rule()
    def free_disk(self) -> None:
        self.disk.capacity_bytes = None

    @rule(share=st.floats(0, 1))
    def delete(self, share: float) -> None:
        self.log.delete_before(int(self.log.durable_position * share))
        self.dropped_before = self.log.start_position

    @rule()
    def kill(self) -> None:
        self.restart(self.disk.after_kill(), self.log.written_position)

    @rule(seed=st.none() | st.integers(0, 10_000))
    def cut_power(self, seed: int | None) -> None:
        keep = None if seed is None else Random(seed)
        self.restart(self.disk.after_power_cut(keep), self.log.durable_position)

    def restart(self, disk: FaultyDisk, kept_position: int) -> None:
        """Recovers; everything before `kept_position` must be there, and in order."""
        self.disk = disk
        self.log = SegmentedLog.open("/log", disk, segment_bytes=SEGMENT_BYTES)
        found = [(entry.position, bytes(entry.body)) for entry in self.log.recover()]
        assert self.log.start_position <= self.dropped_before
        expected = [e for e in self.there if e[0] >= self.log.start_position]
        assert found == expected[: len(found)]
        assert self.log.end_position >= kept_position
        assert self.log.durable_position == self.log.end_position
        self.there = [e for e in self.there if e[0] < self.log.end_position]
        self.dropped_before = self.log.start_position

    @invariant()
    def positions_are_in_order(self) -> None:
        log = self.log
        assert log.durable_position <= log.written_position <= log.end_position
        assert log.pending_bytes == log.end_position - log.written_position

    @precondition(lambda self: self.there)
    @rule(choice=st.randoms(use_true_random=False))
    def read(self, choice: Random) -> None:
        position, body = choice.choice(self.there)
        if self.log.start_position <= position < self.log.written_position:
            assert self.log.read_entry(position).body == body

    @invariant()
    def what_is_written_is_read(self) -> None:
        expected = [
            e for e in self.there if self.dropped_before <= e[0] < self.log.written_position
        ]
        entries = self.log.entries(self.log.start_position)
        assert [(e.position, bytes(e.body)) for e in entries] == expected


TestLog = LogMachine.TestCase
TestLog.settings = settings(stateful_step_count=30)
