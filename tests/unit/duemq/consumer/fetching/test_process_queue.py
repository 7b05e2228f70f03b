from dataclasses import dataclass

import pytest

from duemq.consumer.fetching.process_queue import ProcessQueue
from duemq.consumer.settings import Window
from duemq.errors import InvariantError


@dataclass(frozen=True)
class Offered:
    offset: int


def offered(*offsets: int) -> list[Offered]:
    return [Offered(offset) for offset in offsets]


def test_all_finished_goes_on_after_the_last() -> None:
    queue = ProcessQueue[Offered](1001)
    chunk = queue.add(offered(*range(1001, 1011)), 1011, 100)
    for _ in range(10):
        chunk.finish_next()
    queue.settle(chunk)
    assert queue.commit_point == 1011
    assert queue.unfinished == 0


def test_the_smallest_unfinished_holds_the_commit_point() -> None:
    queue = ProcessQueue[Offered](1001)
    first = queue.add(offered(*range(1001, 1009)), 1009, 80)
    queue.add(offered(1009, 1010), 1011, 20)
    first.finish_next(8)
    queue.settle(first)
    assert queue.commit_point == 1009
    assert queue.unfinished == 2


def test_one_that_fails_holds_the_commit_point_while_the_rest_is_finished() -> None:
    queue = ProcessQueue[Offered](1001)
    chunk = queue.add(offered(*range(1001, 1011)), 1011, 100)
    index = chunk.set_aside()
    chunk.finish_next(9)
    queue.settle(chunk)
    assert queue.commit_point == 1001
    assert queue.unfinished == 1
    chunk.finish_aside(index)
    queue.settle(chunk)
    assert queue.commit_point == 1011
    assert queue.unfinished == 0


def test_the_first_unfinished_holds_all_that_is_finished_after_it() -> None:
    queue = ProcessQueue[Offered](1001)
    first = queue.add(offered(1001), 1002, 10)
    rest = queue.add(offered(*range(1002, 1011)), 1011, 90)
    rest.finish_next(9)
    queue.settle(rest)
    assert queue.commit_point == 1001
    first.finish_next()
    queue.settle(first)
    assert queue.commit_point == 1011


def test_chunks_finish_in_any_order() -> None:
    queue = ProcessQueue[Offered](0)
    chunks = [queue.add(offered(n, n + 1), n + 2, 2) for n in range(0, 10, 2)]
    points = []
    for chunk in (chunks[2], chunks[0], chunks[4], chunks[1], chunks[3]):
        chunk.finish_next(2)
        queue.settle(chunk)
        points.append(queue.commit_point)
    assert points == [0, 2, 2, 6, 10]


def test_progress_within_a_chunk_counts_before_it_is_settled() -> None:
    queue = ProcessQueue[Offered](5)
    chunk = queue.add(offered(5, 6, 7), 8, 3)
    chunk.finish_next()
    assert queue.commit_point == 6


def test_the_earliest_of_several_that_failed_counts() -> None:
    queue = ProcessQueue[Offered](0)
    chunk = queue.add(offered(0, 1, 2, 3), 4, 4)
    chunk.finish_next()
    second = chunk.set_aside()
    third = chunk.set_aside()
    assert queue.commit_point == 1
    chunk.finish_aside(second)
    assert queue.commit_point == 2
    chunk.finish_next()
    assert queue.commit_point == 2
    chunk.finish_aside(third)
    assert queue.commit_point == 4


def test_what_the_filter_left_out_never_holds_the_commit_point() -> None:
    queue = ProcessQueue[Offered](0)
    chunk = queue.add(offered(3, 7), 12, 2)
    assert queue.commit_point == 3
    chunk.finish_next()
    assert queue.commit_point == 7
    chunk.finish_next()
    assert queue.commit_point == 12
    queue.settle(chunk)
    queue.skip_to(40)
    assert queue.commit_point == 40
    assert queue.pull_offset == 40


def test_a_skip_waits_for_what_is_before_it() -> None:
    queue = ProcessQueue[Offered](0)
    chunk = queue.add(offered(3), 4, 1)
    queue.skip_to(40)
    assert queue.commit_point == 3
    chunk.finish_next()
    assert queue.commit_point == 40


def test_settling_twice_counts_once() -> None:
    queue = ProcessQueue[Offered](0)
    chunk = queue.add(offered(0, 1), 2, 10)
    chunk.finish_next(2)
    queue.settle(chunk)
    queue.settle(chunk)
    assert queue.unfinished == 0
    assert queue.has_room(Window(messages=1, bytes=1, span=1))


def test_the_window_closes_on_messages_bytes_and_span() -> None:
    queue = ProcessQueue[Offered](0)
    chunk = queue.add(offered(*range(10)), 10, 1_000)
    assert queue.has_room(Window(messages=11, bytes=1_001, span=11))
    assert not queue.has_room(Window(messages=10, bytes=1_001, span=11))
    assert not queue.has_room(Window(messages=11, bytes=1_000, span=11))
    assert not queue.has_room(Window(messages=11, bytes=1_001, span=10))
    assert not queue.has_room(Window(messages=20, bytes=2_000, span=11), fill=0.5)
    chunk.finish_next(9)
    queue.settle(chunk)
    assert queue.has_room(Window(messages=2, bytes=1_001, span=2))


def test_one_that_fails_closes_the_window_only_by_its_span() -> None:
    queue = ProcessQueue[Offered](0)
    window = Window(messages=1_000, bytes=1 << 20, span=2_000)
    failed = queue.add(offered(0), 1, 1)
    failed.set_aside()
    for start in range(1, 2_000, 100):
        assert queue.has_room(window)
        chunk = queue.add(offered(*range(start, start + 100)), start + 100, 100)
        chunk.finish_next(100)
        queue.settle(chunk)
    assert not queue.has_room(window)
    failed.finish_aside(0)
    queue.settle(failed)
    assert queue.has_room(window)


def test_messages_are_taken_over_once_and_in_order() -> None:
    queue = ProcessQueue[Offered](5)
    with pytest.raises(InvariantError):
        queue.add(offered(4), 5, 1)
    queue.add(offered(5), 6, 1)
    with pytest.raises(InvariantError):
        queue.add(offered(5), 6, 1)
    with pytest.raises(InvariantError):
        queue.add([], 7, 0)


def test_a_stuck_worker_keeps_its_message_and_loses_the_rest() -> None:
    queue = ProcessQueue[Offered](0)
    chunk = queue.add(offered(0, 1, 2, 3), 4, 4)
    stuck = chunk.walk
    stuck.next += 1
    assert chunk.cut_off(1)
    assert stuck.stopped
    assert not chunk.walk.stopped
    assert (chunk.position, chunk.unfinished, queue.commit_point) == (2, 3, 1)
    chunk.finish_next(2)
    assert queue.commit_point == 1
    stuck.next += 1  # it returned at last; the event loop has the say
    assert queue.commit_point == 1
    chunk.finish_aside(1)
    assert queue.commit_point == 4


def test_what_was_set_aside_before_stays_aside() -> None:
    queue = ProcessQueue[Offered](0)
    chunk = queue.add(offered(0, 1, 2, 3), 4, 4)
    first = chunk.set_aside()
    assert chunk.cut_off(1)
    chunk.finish_next(2)
    chunk.finish_aside(1)
    assert queue.commit_point == 0
    chunk.finish_aside(first)
    assert queue.commit_point == 4


def test_a_worker_that_got_on_is_not_cut_off_but_stops() -> None:
    chunk = ProcessQueue[Offered](0).add(offered(0, 1, 2), 3, 3)
    walk = chunk.walk
    chunk.finish_next(2)
    assert not chunk.cut_off(1)
    assert chunk.walk is walk
    assert walk.stopped
    assert chunk.unfinished == 1


def test_a_whole_chunk_can_be_taken_away() -> None:
    queue = ProcessQueue[Offered](0)
    chunk = queue.add(offered(0, 1, 2), 3, 3)
    assert chunk.cut_off(0, 3)
    assert (chunk.position, chunk.unfinished) == (3, 3)
    for index in (2, 0, 1):
        chunk.finish_aside(index)
    assert queue.commit_point == 3


def test_a_dropped_queue_stops_every_walk() -> None:
    queue = ProcessQueue[Offered](0)
    chunks = [queue.add(offered(n), n + 1, 1) for n in range(3)]
    queue.drop()
    assert queue.dropped
    assert all(chunk.walk.stopped for chunk in chunks)
