import pytest

from duemq_server.broker.store.retention import SegmentAge, cut_position, newest_times

SEGMENTS = [
    SegmentAge(0, 100, 1_000),
    SegmentAge(100, 200, 2_000),
    SegmentAge(200, 300, 3_000),
]
END = 350


def cut(now_ms: int = 0, keep_ms: int = 0, keep_bytes: int = 0, hold: int = END) -> int:
    return cut_position(SEGMENTS, END, now_ms, keep_ms, keep_bytes, hold, nothing)


def nothing(position: int) -> int:
    return 0


def test_without_a_limit_everything_is_kept() -> None:
    assert cut(now_ms=1 << 40) == 0


def test_segments_whose_newest_record_is_too_old_go() -> None:
    assert cut(now_ms=2_500, keep_ms=600) == 100
    assert cut(now_ms=2_500, keep_ms=500) == 100
    assert cut(now_ms=9_000, keep_ms=1) == 300


def test_the_log_keeps_at_least_the_size_asked_for() -> None:
    assert cut(keep_bytes=150) == 200
    assert cut(keep_bytes=1_000) == 0


def test_nothing_that_is_needed_goes() -> None:
    assert cut(now_ms=9_000, keep_ms=1, hold=199) == 100
    assert cut(now_ms=9_000, keep_ms=1, hold=0) == 0


def test_an_empty_log_is_cut_nowhere() -> None:
    assert cut_position([], 10, 9_000, 1, 1, 10, nothing) == 0


@pytest.mark.parametrize(
    ("followed", "newest"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, None, 3], [1, 3, 3]),
        ([None, None], [100, 100]),
        ([1, 900, 3], [1, 3, 3]),  # stored while the clock was ahead
        ([900, 901, 3], [3, 3, 3]),
        ([900, 901], [100, 100]),
        ([50, 2, 60], [50, 60, 60]),  # stored while the clock was behind
        ([1, 70, 3, 80], [1, 70, 80, 80]),  # was ahead, which nobody can tell any more
    ],
)
def test_a_time_that_cannot_be_true_gives_way_to_a_later_one(
    followed: list[int | None], newest: list[int]
) -> None:
    segments = [SegmentAge(10 * n, 10 * n + 10, at) for n, at in enumerate(followed)]
    assert newest_times(segments, 100) == newest


def test_segments_of_unknown_age_go_for_their_size_and_before_an_old_one() -> None:
    unknown = [SegmentAge(0, 100, None), SegmentAge(100, 200, None), SegmentAge(200, 300, 3_000)]
    assert cut_position(unknown, END, 9_000, 0, 150, END, nothing) == 200
    assert cut_position(unknown, END, 9_000, 1_000, 0, END, nothing) == 300
    assert cut_position(unknown[:2], END, 9_000, 1_000, 0, END, nothing) == 0
