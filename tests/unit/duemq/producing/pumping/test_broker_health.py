import pytest

from duemq.producing.pumping.broker_health import Health, avoidance_ms


@pytest.mark.parametrize(
    ("answer_ms", "avoided_ms"),
    [
        (0, 0),
        (549, 0),
        (550, 2_000),
        (1_800, 5_000),
        (3_000, 6_000),
        (5_000, 10_000),
        (15_000, 30_000),
        (90_000, 30_000),
    ],
)
def test_the_table(answer_ms, avoided_ms):
    assert avoidance_ms(answer_ms) == avoided_ms


def test_a_failed_broker_is_avoided_for_a_while():
    health = Health()
    assert health.available("a", now_ms=0)
    health.failed("a", now_ms=0)
    assert not health.available("a", now_ms=9_999)
    assert health.available("b", now_ms=0)
    assert health.available("a", now_ms=10_000)


def test_a_fast_answer_ends_an_avoidance():
    health = Health()
    health.failed("a", now_ms=0)
    health.answered("a", answer_ms=3, now_ms=1)
    assert health.available("a", now_ms=1)
    health.answered("a", answer_ms=600, now_ms=1)
    assert not health.available("a", now_ms=2_000)
