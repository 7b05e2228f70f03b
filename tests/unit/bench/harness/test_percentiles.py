"""Nearest rank, as the docstring says."""

from duemq_server.bench.harness.percentiles import percentile, summary


def test_nearest_rank() -> None:
    values = list(range(1, 11))
    assert [percentile(values, share) for share in (0.0, 0.5, 0.51, 0.99, 1.0)] == [1, 5, 6, 10, 10]


def test_summary_of_nothing_is_empty() -> None:
    assert summary([]) == {}


def test_summary_sorts() -> None:
    assert summary([3.0, 1.0, 2.0]) == {"p50_ms": 2.0, "p99_ms": 3.0, "max_ms": 3.0}
