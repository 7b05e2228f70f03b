"""Metrics at a provider that fails: it is the application's, and costs no message."""

import logging

import pytest
from opentelemetry import metrics

from duemq.tracing import guarded, meters


class Fails(Exception):
    """As a view, an exemplar reservoir or a provider of the application's own may."""


def fail(*given, **named):
    raise Fails


class Instrument:
    add = record = fail


class Meter:
    create_counter = create_histogram = lambda *given, **named: Instrument()


class Provider:
    def get_meter(self, *named):
        return Meter()


@pytest.fixture(autouse=True)
def nobody_was_told(monkeypatch):
    monkeypatch.setattr(guarded, "_told", set())
    yield
    meters.use(None)


def test_what_an_instrument_raises_is_told_once(caplog):
    meters.use(Provider())
    called = []
    with caplog.at_level(logging.ERROR):
        meters.sent("t", 1, 0.1, None)
        meters.received("t", "g", 1, 0.1)
        meters.settled("t", "g", 0.1, None)
        with meters.processing("t", "g"):
            called.append(True)
    assert called
    assert [type(record.exc_info[1]) for record in caplog.records] == [Fails]


def test_a_provider_that_has_no_instruments_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(Provider, "get_meter", fail)
    monkeypatch.setattr(metrics, "get_meter_provider", Provider)
    assert [meters.enabled() for _ in range(2)] == [False, False]
    assert len(caplog.records) == 1
