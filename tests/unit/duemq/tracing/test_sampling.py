"""Drawn as the sampler would decide, without asking it."""

import threading
from collections import Counter

import pytest
from opentelemetry.context import attach, detach, set_value
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.trace import SpanContext, TraceFlags

from duemq.tracing.sampling import (
    NEVER,
    NO_CONTEXT,
    RUN_MESSAGES,
    ChosenIds,
    Head,
    current_context,
    runs_of,
)

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


def test_a_ratio_that_is_next_to_nothing_draws_nothing():
    nearly = Head("TraceIdRatioBased{1e-310}")
    assert {nearly.gap() for _ in range(100)} == {NEVER}


def test_what_is_off_draws_nothing_and_what_is_on_everything():
    for sampler in (sampling.ALWAYS_OFF, sampling.DEFAULT_OFF, RATIO(0.0)):
        assert head(sampler).gap() == NEVER
    for sampler in (sampling.ALWAYS_ON, sampling.DEFAULT_ON, RATIO(1.0)):
        assert list(head(sampler).drawn(3)) == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 3, RUN_MESSAGES, RUN_MESSAGES + 1, 930, 8 * RUN_MESSAGES])
def test_messages_sent_together_are_cut_into_runs_of_one_length(count):
    runs = runs_of(count)
    assert [at for run in runs for at in run] == list(range(count))
    assert len(runs) == -(-count // RUN_MESSAGES)
    assert max(map(len, runs)) <= RUN_MESSAGES
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert list(head(RATIO(1.0)).drawn_runs(count)) == runs
    assert list(head(RATIO(0.0)).drawn_runs(count)) == []


@pytest.mark.parametrize("ratio", [0.5, 0.1, 0.01])
def test_so_many_messages_are_drawn_by_runs_wherever_they_stand(ratio):
    known, calls, taken = head(RATIO(ratio)), round(1_000 / ratio), Counter()
    for _ in range(calls):
        taken.update(run.start for run in known.drawn_runs(3 * RUN_MESSAGES))
    assert set(taken) == {0, RUN_MESSAGES, 2 * RUN_MESSAGES}
    # Six standard deviations of a binomial distribution.
    spread = 6 * (1_000 * (1 - ratio)) ** 0.5
    assert all(abs(count - 1_000) <= spread for count in taken.values())


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


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.3, 0.1, 1 / 256, 0.003, 1e-5, 1e-9, 1e-15, 2e-19])
def test_ids_that_were_drawn_together_are_ones_that_the_sampler_takes(ratio):
    sampler = RATIO(ratio)
    drawn = head(sampler).trace_ids(RUN_MESSAGES)
    ids = [int.from_bytes(drawn[at : at + 16], "big") for at in range(0, len(drawn), 16)]
    assert len(set(ids)) == RUN_MESSAGES
    for trace_id in ids:
        assert sampler.should_sample(None, trace_id, "send").decision.is_sampled()


def test_ids_that_were_drawn_together_differ_in_the_half_that_samplers_read():
    """Who samples once more, by the same half, keeps a part of each run and not all or nothing."""
    drawn = head(RATIO(0.1)).trace_ids(RUN_MESSAGES)
    halves = [int.from_bytes(drawn[at + 8 : at + 16], "big") for at in range(0, len(drawn), 16)]
    kept = sum(half < 0.05 * (1 << 64) for half in halves)
    assert RUN_MESSAGES / 4 < kept < RUN_MESSAGES * 3 / 4


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
