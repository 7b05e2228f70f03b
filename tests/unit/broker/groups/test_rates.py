from duemq_server.broker.groups.rates import SAMPLE_INTERVAL_MS, SAMPLES_MAX, WINDOW_MS, Rates

STEP = SAMPLE_INTERVAL_MS


def sampled(values: list[int], key: str = "q") -> tuple[Rates[str], int]:
    """A value a round; answers the time of the last one."""
    rates: Rates[str] = Rates()
    now_ms = 0
    for number, value in enumerate(values):
        now_ms = number * STEP
        rates.sample(now_ms, [(key, value)])
    return rates, now_ms


def test_a_steady_counter_has_its_rate() -> None:
    rates, now_ms = sampled([10 * 5 * number for number in range(30)])
    assert rates.per_second("q", 10 * 5 * 29, now_ms) == 10


def test_what_grew_since_the_last_round_counts_at_once() -> None:
    rates, now_ms = sampled([0, 0])
    assert rates.per_second("q", 300, now_ms + STEP) == 300 / (2 * STEP / 1000)


def test_a_burst_is_spread_over_the_minute_and_then_forgotten() -> None:
    rates, now_ms = sampled([0] * 13 + [600])
    assert rates.per_second("q", 600, now_ms) == 10
    for _ in range(WINDOW_MS // STEP + 1):
        now_ms += STEP
        rates.sample(now_ms, [("q", 600)])
    assert rates.per_second("q", 600, now_ms) == 0
    assert not rates._moves


def test_a_counter_that_was_set_back_grows_from_there() -> None:
    rates, now_ms = sampled([1_000, 1_000, 0, 50])
    assert rates.per_second("q", 100, now_ms + STEP) == 100 / (4 * STEP / 1000)


def test_an_unknown_counter_has_no_rate() -> None:
    rates, now_ms = sampled([5])
    assert rates.per_second("other", 100, now_ms) == 0
    assert rates.per_second("q", 5, now_ms) == 0


def test_what_a_new_counter_has_grown_by_counts() -> None:
    rates, now_ms = sampled([0, 0])
    now_ms += STEP
    rates.sample(now_ms, [("q", 0), ("new", 100)], began_at=0)
    assert rates.per_second("new", 100, now_ms) == 100 / (STEP / 1000)
    rates.sample(now_ms + STEP, [("q", 0), ("newer", 100)])
    assert rates.per_second("newer", 100, now_ms + STEP) == 0


def test_counters_that_are_gone_are_forgotten() -> None:
    rates, now_ms = sampled([0, 100])
    rates.sample(now_ms + STEP, [("other", 1)])
    assert rates.per_second("q", 200, now_ms + STEP) == 0
    assert not rates._moves


def test_samples_are_bounded() -> None:
    rates, _ = sampled(list(range(1_000)))
    assert len(rates._moves["q"]) <= SAMPLES_MAX
