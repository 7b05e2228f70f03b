"""An index of numbered entries against a set of numbers, whatever is left out, cut and dropped."""

import struct

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from duemq_server.storage.indexes.index import FixedIndex
from tests.crash.faulty_disk import FaultyDisk

ENTRY = struct.Struct("<Q")


class IndexModel(RuleBasedStateMachine):
    """Each entry says its number."""

    @initialize(per_file=st.sampled_from([1, 2, 3, 5]))
    def make(self, per_file: int) -> None:
        self.disk = FaultyDisk()
        self.file_bytes = per_file * ENTRY.size
        self.numbers: list[int] = []
        self.first = self.end = 0
        self.index = self.opened()

    def opened(self) -> FixedIndex:
        return FixedIndex("/index", self.disk, ENTRY.size, file_bytes=self.file_bytes)

    def there(self) -> list[int]:
        return [number for number in self.numbers if number >= self.first]

    @rule(count=st.integers(1, 7))
    def append(self, count: int) -> None:
        new = range(self.end, self.end + count)
        self.index.append(b"".join(map(ENTRY.pack, new)))
        self.numbers += new
        self.end += count

    @rule(more=st.integers(1, 11))
    def leave_out(self, more: int) -> None:
        self.end += more
        self.index.skip_to(self.end)
        if not self.there():
            self.first = self.end

    @rule(share=st.floats(0, 1), keep_files=st.booleans())
    def drop(self, share: float, keep_files: bool) -> None:
        number = self.first + int(share * (self.end - self.first))
        self.index.drop_before(number)
        if not keep_files:
            self.index.remove_before(number)
        self.first = min((each for each in self.numbers if each >= number), default=self.end)

    @precondition(lambda self: self.there())
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        self.end = data.draw(st.sampled_from(self.there()))
        self.index.truncate(self.end)
        self.numbers = [number for number in self.numbers if number < self.end]

    @rule()
    def sync(self) -> None:
        self.index.sync()

    @rule()
    def open_again(self) -> None:
        self.index.close()
        self.index = self.opened()
        assert self.index.first <= self.first
        self.index.drop_before(self.first)  # as its owner does
        self.index.remove_before(self.first)

    @invariant()
    def all_is_there(self) -> None:
        there = self.there()
        assert (self.index.first, self.index.end) == (self.first, self.end)
        assert self.index.count(self.first) == len(there)
        read: list[int] = []
        number = self.first
        while (number := self.index.present(number)) < self.end:
            found = [each for (each,) in ENTRY.iter_unpack(self.index.read(number, 4))]
            assert found == list(range(number, number + len(found)))
            assert found
            read += found
            number += len(found)
        assert read == there


IndexModel.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
test_index = IndexModel.TestCase


def test_numbers_left_out_twice_are_left_out_after_a_start() -> None:
    """Where the first gap ended just where a full file would, and so does the second."""
    disk = FaultyDisk()
    index = FixedIndex("/index", disk, ENTRY.size, file_bytes=2 * ENTRY.size)
    index.append(ENTRY.pack(0))
    index.skip_to(2)
    index.skip_to(3)
    index.close()
    again = FixedIndex("/index", disk, ENTRY.size, file_bytes=2 * ENTRY.size)
    assert (again.present(1), again.count(0), again.end) == (3, 1, 3)
