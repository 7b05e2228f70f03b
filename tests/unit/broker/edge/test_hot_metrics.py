from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from duemq_server.broker.edge.hot_metrics import HotCounter, HotHistogram

BOUNDS = (0.001, 0.5, 1, 20.0)


def page(registry: CollectorRegistry) -> list[str]:
    """The metrics page, without the times at which metrics were made."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.sampled_from([0.0, 0.001, 0.25, 0.5, 0.75, 1.0, 20.0, 20.5, 1e9])))
def test_the_page_is_that_of_the_library(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = HotHistogram("seconds", "How long", BOUNDS, ours)
    count = HotCounter("bytes", "How many", ours)
    histogram = Histogram("seconds", "How long", buckets=BOUNDS, registry=theirs)
    counter = Counter("bytes", "How many", registry=theirs)
    for value in values:
        tally.observe(value)
        histogram.observe(value)
        count.value += int(value)
        counter.inc(int(value))
    assert page(ours) == page(theirs)
