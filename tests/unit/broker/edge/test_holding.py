"""How long a batch is held that is ahead of its time."""

import pytest

from duemq_server.broker.edge.send_requests import seconds_left


@pytest.mark.parametrize(
    ("ms", "wall_ns", "left_s"),
    [(2, 7_000_000, 0.002), (2, 7_300_000, 0.0017), (1, 7_999_999, 1e-9)],
)
def test_it_ends_with_the_millisecond(ms: int, wall_ns: int, left_s: float) -> None:
    assert seconds_left(ms, wall_ns) == pytest.approx(left_s, abs=1e-12)
