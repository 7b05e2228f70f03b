import numpy as np
import pytest

from timer_service.lateness import BOUNDS_MS, BUCKETS, EXACT_MS, Lateness

NOW = 1_700_000_000_000


def test_bounds_grow_by_an_eighth_at_most() -> None:
    assert len(BOUNDS_MS) == BUCKETS
    assert (np.diff(BOUNDS_MS) > 0).all()
    above = BOUNDS_MS[EXACT_MS:].astype(float)
    assert (above[1:] / above[:-1]).max() < 1.13


def test_percentiles_of_nothing_are_zero() -> None:
    assert Lateness().percentiles(NOW, 0.5, 0.99) == [0.0, 0.0]


def test_percentiles_and_maximum_are_of_the_last_minute() -> None:
    lateness = Lateness()
    lateness.record(np.array([50_000]), NOW - 70_000)
    lateness.record(np.arange(100), NOW - 30_000)
    lateness.record(np.array([1] * 100), NOW)

    p50, p99 = lateness.percentiles(NOW, 0.5, 0.99)

    assert p50 == 1.0
    assert p99 == pytest.approx(98, rel=0.13)
    assert lateness.max_ms(NOW) == 99
    assert lateness.count == 201


def test_early_fires_are_counted() -> None:
    lateness = Lateness()
    lateness.record(np.array([0, -1, 5]), NOW)

    lateness.percentiles(NOW, 0.5)

    assert lateness.early == 1
