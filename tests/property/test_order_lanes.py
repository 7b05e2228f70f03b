"""Order within a queue, for random keys, outcomes and interleavings."""

from collections import defaultdict
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from duemq.consumer.delivery.order_lanes import OrderLanes, Segment
from duemq.consumer.fetching.process_queue import ProcessQueue
from duemq.outcomes import Failed

KEYS = ("a", "b", "c", None)
ERROR = ValueError("no")


@dataclass(frozen=True)
class Sent:
    """A message of the model."""

    offset: int
    key: str | None


@dataclass(eq=False)
class Run:
    """What a worker has."""

    segments: list[Segment[Sent]]
    current: int = 0
    """Segments before this one are worked through."""


class World:
    """A queue, its lanes and its workers; every step checks what must always hold."""

    def __init__(self, draw, *, whole_queue: bool, lists: bool) -> None:
        self.draw = draw
        self.whole_queue = whole_queue
        self.lists = lists
        self.now_ms = 0
        self.pending: ProcessQueue[Sent] = ProcessQueue(0)
        self.lanes: OrderLanes[Sent] = OrderLanes(self.lane_of, lists=lists)
        self.chunks = []
        self.runs: list[Run] = []
        self.suspended: list[tuple[int, set[int]]] = []
        self.unfinished: set[int] = set()
        self.sent: dict[int, Sent] = {}
        self.settled: defaultdict[object, list[int]] = defaultdict(list)
        """By key, in the order they were finished or given up."""

    def lane_of(self, message: Sent) -> object:
        return True if self.whole_queue else message.key

    # --- steps --------------------------------------------------------------------------------

    def pull(self) -> None:
        gap = self.draw(st.integers(0, 2))  # left out by a filter
        start = self.pending.pull_offset + gap
        keys = self.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
        messages = [Sent(start + index, key) for index, key in enumerate(keys)]
        chunk = self.pending.add(messages, start + len(messages), 1)
        self.chunks.append(chunk)
        self.lanes.add(chunk)
        self.sent.update((message.offset, message) for message in messages)
        self.unfinished.update(message.offset for message in messages)

    def take(self) -> bool:
        limit = self.draw(st.integers(1, 5))
        run = self.lanes.take(self.now_ms, limit)
        if not run:
            return False
        for segment in run:
            self.check_may_run(segment)
        if self.lists:
            assert len(run) == 1
        else:
            assert sum(len(segment.entries) for segment in run) <= limit
        self.runs.append(Run(run))
        return True

    def end(self) -> None:
        """A worker is through with a run, or stops somewhere within it."""
        if not self.runs:
            return
        run = self.runs.pop(self.draw(st.integers(0, len(self.runs) - 1)))
        for segment in run.segments[run.current :]:
            if self.draw(st.booleans()) and self.draw(st.booleans()):
                break  # the lease is over, or its time: what follows is untried
            self.work(segment)
        for failure in self.lanes.ended(run.segments):
            assert failure.error is ERROR
            self.judge(failure.lane)

    def hang(self) -> None:
        """A worker gets to some message of its run and stays there; the rest is taken back."""
        if not self.runs:
            return
        run = self.runs[self.draw(st.integers(0, len(self.runs) - 1))]
        while run.current < len(run.segments) - 1 and self.draw(st.booleans()):
            self.work(run.segments[run.current])
            run.current += 1
        segment = run.segments[run.current]
        if not self.lists and (segment.free or not segment.failures):
            for entry in segment.entries[segment.done : -1][: self.draw(st.integers(0, 2))]:
                if segment.free and self.draw(st.booleans()):
                    segment.failures.append(Failed(segment.done, 1, ERROR))
                else:
                    self.finish(entry)
                segment.done += 1
        begun = segment.entries[segment.done : segment.done + 1]
        *tried, hung = self.lanes.take_back(run.segments, run.current)
        assert hung.entries[segment.done : segment.done + 1] == begun
        run.segments, run.current = [hung], 0
        for failure in self.lanes.ended(tried):
            self.judge(failure.lane)

    def work(self, segment: Segment[Sent]) -> None:
        if self.lists:
            if not segment.done and not segment.failures:
                self.work_list(segment)
            return
        while segment.done < len(segment.entries):
            if segment.failures and not segment.free:
                return
            if self.draw(st.integers(0, 3)) == 0:
                segment.failures.append(Failed(segment.done, 1, ERROR))
                if not segment.free:
                    return
            else:
                self.finish(segment.entries[segment.done])
            segment.done += 1

    def work_list(self, segment: Segment[Sent]) -> None:
        """It is done, or fails: as a whole, or some messages of it."""
        count = len(segment.entries)
        named = self.draw(st.sets(st.integers(0, count - 1)))
        failures = [Failed(index, 1, ERROR) for index in sorted(named)]
        if self.draw(st.booleans()):
            failures = [Failed(0, count, ERROR)]
        segment.done = count
        if failures and not segment.free:
            del failures[1:]
            segment.done = failures[0].index
        undone = {each.index + n for each in failures for n in range(each.count)}
        for index in range(segment.done):
            if index not in undone:
                self.finish(segment.entries[index])
        segment.failures += failures

    def succeed(self, run: Run) -> None:
        """A worker does all that it has, but for what has failed already."""
        for segment in run.segments:
            if not segment.failures or (segment.free and not self.lists):
                for entry in segment.entries[segment.done :]:
                    self.finish(entry)
                segment.done = len(segment.entries)
        for failure in self.lanes.ended(run.segments):
            self.lanes.suspend(failure.lane, self.now_ms)

    def finish(self, entry) -> None:
        entry.finish()
        self.note_settled(entry.message)

    def judge(self, lane) -> None:
        first = lane.first
        assert first
        if lane.failures >= 2 and self.draw(st.booleans()):
            gone = [entry for entry in first if self.draw(st.booleans())]
            if gone:
                self.lanes.pass_first(lane, gone)
                for entry in gone:
                    self.note_settled(entry.message)
            if len(gone) == len(first):
                return
        until_ms = self.now_ms + self.draw(st.integers(0, 3))
        self.lanes.suspend(lane, until_ms)
        self.suspended.append((until_ms, {entry.message.offset for entry in lane.first}))

    def wait(self) -> None:
        self.now_ms += 1
        self.suspended = [each for each in self.suspended if each[0] > self.now_ms]

    # --- what must hold -----------------------------------------------------------------------

    def note_settled(self, message: Sent) -> None:
        self.unfinished.remove(message.offset)  # once
        self.settled[self.lane_of(message)].append(message.offset)

    def check_may_run(self, segment: Segment[Sent]) -> None:
        in_flight = {
            self.lane_of(entry.message)
            for run in self.runs
            for other in run.segments
            for entry in other.entries
        }
        keys = {self.lane_of(entry.message) for entry in segment.entries}
        offsets = [entry.message.offset for entry in segment.entries]
        assert len(keys) == 1
        [key] = keys
        for until_ms, waiting in self.suspended:
            assert until_ms <= self.now_ms or not waiting & set(offsets)
        if key is None:
            running = {
                entry.message.offset
                for run in self.runs
                for other in run.segments
                for entry in other.entries
            }
            assert not running & set(offsets)
            return
        assert key not in in_flight
        of_key = sorted(
            offset for offset in self.unfinished if self.lane_of(self.sent[offset]) == key
        )
        assert offsets == of_key[: len(offsets)]  # from the front, none left out

    def check(self) -> None:
        for chunk in self.chunks:
            self.pending.settle(chunk)
        expected = min(self.unfinished, default=self.pending.pull_offset)
        assert self.pending.commit_point == expected
        assert self.pending.unfinished == len(self.unfinished)


@given(st.data(), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_order_holds_and_nothing_is_lost(data, whole_queue: bool, lists: bool) -> None:
    world = World(data.draw, whole_queue=whole_queue, lists=lists)
    steps = {
        "pull": world.pull,
        "take": world.take,
        "hang": world.hang,
        "end": world.end,
        "wait": world.wait,
    }
    for step in data.draw(st.lists(st.sampled_from(sorted(steps)), max_size=40)):
        steps[step]()
        world.check()
    while world.unfinished:
        while world.take():
            pass
        if not world.runs:
            assert world.lanes.wake_ms is not None
            world.wait()
        while world.runs:
            world.succeed(world.runs.pop())
        world.check()
    for key, offsets in world.settled.items():
        if key is not None and not lists:  # of a list that is given up, messages go one by one
            assert offsets == sorted(offsets)
    assert world.lanes.take(world.now_ms, 10) == []
    assert world.lanes.wake_ms is None
