"""Drawn as the sampler would decide, without asking it."""

import threading

import pytest
from opentelemetry.context import attach, detach, set_value
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.trace import SpanContext, TraceFlags

from duemq.tracing.sampling import NEVER, NO_CONTEXT, ChosenIds, Head, current_context

RATIO = sampling.TraceIdRatioBased
DRAWS = 20_000


def head(sampler):
    return Head(sampler.get_description())


def span_context(trace_id, *, sampled):
    return SpanContext(trace_id, 1, False, TraceFlags(int(sampled)))


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.1, 0.001])
@pytest.mark.parametrize("wrap", [lambda root: root, sampling.ParentBased])
def test_so_many_are_drawn_as_the_sampler_would_take(ratio, wrap):
    known = head(wrap(RATIO(ratio)))
    assert known.known
    count = round(DRAWS / ratio)
    drawn = sum(1 for _ in known.drawn(count))
    # Six standard deviations of a binomial distribution.
    assert abs(drawn - DRAWS) <= 6 * (DRAWS * (1 - ratio)) ** 0.5


def test_what_is_off_draws_nothing_and_what_is_on_everything():
    for sampler in (sampling.ALWAYS_OFF, sampling.DEFAULT_OFF, RATIO(0.0)):
        assert head(sampler).gap() == NEVER
    for sampler in (sampling.ALWAYS_ON, sampling.DEFAULT_ON, RATIO(1.0)):
        assert list(head(sampler).drawn(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    "sampler",
    [
        sampling.ParentBased(sampling.ALWAYS_ON, local_parent_sampled=sampling.ALWAYS_OFF),
        sampling.ParentBased(sampling.ParentBased(RATIO(0.1))),
        sampling.AlwaysRecordSampler(sampling.ALWAYS_OFF),
    ],
)
def test_a_sampler_of_another_kind_is_asked_about_each_message(sampler):
    assert not head(sampler).known
    assert list(head(sampler).drawn(3)) == [0, 1, 2]
    assert not Head("").known


@pytest.mark.parametrize("ratio", [1.0, 0.3, 1e-9])
def test_an_id_that_was_drawn_is_one_that_the_sampler_takes(ratio):
    sampler = RATIO(ratio)
    ids = ChosenIds(TracerProvider().id_generator, head(sampler))
    for _ in range(200):
        trace_id = ids.generate_trace_id()
        assert 0 < trace_id < 1 << 128
        assert sampler.should_sample(None, trace_id, "send").decision.is_sampled()
        assert head(sampler).follows(span_context(trace_id, sampled=False))
    assert ids.generate_span_id() != ids.generate_span_id()


def test_by_the_parent_means_by_its_flag():
    known = head(sampling.ParentBased(RATIO(0.0)))
    assert known.follows(span_context(1, sampled=True))
    assert not known.follows(span_context(1, sampled=False))


def test_the_current_context_is_seen_where_it_is_current():
    assert current_context() is NO_CONTEXT
    token = attach(set_value("a", 1))
    assert current_context() is not NO_CONTEXT
    seen = []
    thread = threading.Thread(target=lambda: seen.append(current_context() is NO_CONTEXT))
    thread.start()
    thread.join()
    detach(token)
    assert seen == [True]
    assert current_context() is NO_CONTEXT
