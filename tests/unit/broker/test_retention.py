from broker.retention import SegmentAge, cut_position

SEGMENTS = [
    SegmentAge(0, 100, 1_000),
    SegmentAge(100, 200, 2_000),
    SegmentAge(200, 300, 3_000),
]
END = 350


def cut(now_ms: int = 0, keep_ms: int = 0, keep_bytes: int = 0, hold: int = END) -> int:
    return cut_position(SEGMENTS, END, now_ms, keep_ms, keep_bytes, hold)


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
    assert cut_position([], 10, 9_000, 1, 1, 10) == 0
