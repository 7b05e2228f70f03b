from duemq_analytics.page.waterfalls import BARS_MAX, KINDS, chosen, waterfalls
from tests.unit.trace_analytics.page.made_rows import example
from tests.unit.trace_analytics.waterfall.test_drawing import MS, span


def test_the_slowest_and_the_latest_get_one_each_message_once():
    examples = [example(kind, f"{kind}-{n}", "g", 1) for kind in KINDS for n in range(20)]
    examples += [example("suspect", "lost"), example("twice", "slowest-0", "g", 1, 2)]
    ids = [row["message_id"] for row in chosen(examples)]
    assert ids == [f"slowest-{n}" for n in range(10)] + [f"latest-{n}" for n in range(5)]
    again = [example("slowest", "m", "g", 9), example("latest", "m", "g", 5)]
    assert [row["us"] for row in chosen(again)] == [9]


def test_a_bar_says_what_who_when_and_whether_it_failed():
    spans = [
        span(0, 10, operation="send", service="shop", instance="shop-1"),
        span(30, 10, operation="process", consumer_group="g", status="ERROR", error_type="Oops"),
        span(40, 0, operation="settle"),
    ]
    (found,) = waterfalls([example("slowest", "m", "g", 30_000)], {"m": spans})
    assert (found.took, found.said, found.whole_ms) == ("30 ms", "from its sending to g", "40.000")
    send, process, settle = found.bars
    assert (send.process, send.at_ms, send.took_ms) == ("shop shop-1", "0.000", "10.000")
    assert (send.left, send.width, send.failed) == ("0.00", "25.00", False)
    assert (process.left, process.width, process.failed) == ("75.00", "25.00", True)
    assert (process.group, process.note) == ("g", "failed: Oops")
    assert (settle.left, settle.width) == ("100.00", "0.00")
    assert len({send.colour, process.colour, settle.colour}) == 3


def test_bars_are_bounded_and_what_has_no_spans_is_left_out():
    spans = {"m": [span(n, 1) for n in range(BARS_MAX + 7)], "n": []}
    examples = [example("slowest", name, "g", 1) for name in ("m", "n", "o")]
    (found,) = waterfalls(examples, spans)
    assert (len(found.bars), found.left_out) == (BARS_MAX, 7)
    assert found.bars[-1].at_ms == f"{(BARS_MAX - 1) * MS / MS:,.3f}"
