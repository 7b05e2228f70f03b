import pytest

from duemq_server.bench.harness.gaps import longest_gap_ms

MS = 1_000_000


@pytest.mark.parametrize(
    ("times_ms", "begin_ms", "end_ms", "longest_ms"),
    [
        ([], 10, 30, 20),
        ([15, 22], 10, 30, 8),
        ([12, 15], 10, 30, 15),
        ([5, 28, 100], 10, 30, 18),
        ([1, 2, 50, 60], 10, 30, 20),
        ([10, 30], 10, 30, 20),
    ],
)
def test_the_longest_time_without_an_event(times_ms, begin_ms, end_ms, longest_ms):
    times_ns = [each * MS for each in times_ms]
    assert longest_gap_ms(times_ns, begin_ms * MS, end_ms * MS) == longest_ms
