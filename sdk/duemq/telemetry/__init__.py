"""Sends this process's spans somewhere: to DueMQ's own %TRACE% topic or to an OTLP collector.

    from duemq import telemetry
    telemetry.configure("checkout", nameserver="127.0.0.1:9876")

`duemq.tracing.spans` makes the spans; without a call here (or a tracer provider of your own) it
makes none.  Needs the extra `telemetry` (opentelemetry-sdk), for collectors `otlp`, imported only
when something is turned on.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from duemq.errors import Unavailable
from duemq.protocol import checks
from duemq.settings import Tls, default_nameserver, default_tls
from duemq.telemetry.counts import REASONS

if TYPE_CHECKING:
    from duemq.telemetry.pipeline import Pipeline

__all__ = ["EXPORTERS", "configure", "configure_from_env", "dropped", "exported", "shutdown"]

EXPORTERS = ("off", "duemq", "otlp")

SHUTDOWN_TIMEOUT_S = 5.0

_PACKAGES = {"duemq": "'duemq[telemetry]'", "otlp": "'duemq[otlp]'"}

_pipeline: Pipeline | None = None

_last: Pipeline | None = None
"""The running pipeline, or the one that ran last."""

_exported = 0
_dropped: Counter[str] = Counter()
"""Of the pipelines before that."""


def configure(
    service: str,
    exporter: str = "duemq",
    *,
    nameserver: str | None = None,
    instance: str = "",
    tls: Tls | None = None,
) -> Pipeline | None:
    """Turns tracing on for this process and answers its pipeline; None for `off`.

    `nameserver`, `tls`: None means what DUEMQ_NAMESERVER and DUEMQ_TLS_… say, as for clients.
    `service` and `instance` become service.name (unless OTEL_SERVICE_NAME says otherwise) and
    service.instance.id.  If the process has an opentelemetry-sdk tracer provider already, the
    exporter joins it.  Sampling: OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG; queue and rhythm:
    OTEL_BSP_*; the collector: OTEL_EXPORTER_OTLP_*.  A second call replaces the first's pipeline.
    At the interpreter's exit `shutdown` is called, after producers that nobody closed have sent.

    Raises InvalidArgument for an unknown exporter, for wrong OTEL_EXPORTER_OTLP_* variables and for
    certificates that cannot be used, Unavailable where a package is missing.
    """
    global _pipeline, _last
    checks.one_of("tracing", exporter, EXPORTERS)
    shutdown()
    _put_by()
    if exporter == "off":
        return None
    try:
        from duemq.telemetry.pipeline import start

        _pipeline = start(
            service,
            exporter,
            nameserver=nameserver or default_nameserver(),
            instance=instance,
            tls=default_tls() if tls is None else tls,
        )
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"tracing {exporter} needs the module {error.name}: pip install {_PACKAGES[exporter]}",
            field="tracing",
            value=exporter,
            retryable=False,
        ) from error
    _last = _pipeline
    # Registered last, called first: OpenTelemetry's own end at exit may wait for 30 s.
    atexit.unregister(_end)
    atexit.register(_end)
    return _pipeline


def configure_from_env(service: str, *, instance: str = "") -> Pipeline | None:
    """As `configure`, with DUEMQ_TRACING (default off)."""
    return configure(
        service,
        os.environ.get("DUEMQ_TRACING", "off"),
        instance=instance,
    )


def _end() -> None:
    """At exit: what producers that nobody closed still send has spans, too."""
    producers = sys.modules.get("duemq.producing.blocking")
    try:
        if producers is not None:
            producers.close_producers()
    finally:  # Ctrl-C, say: brokers do not answer
        shutdown()


def shutdown(timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
    """Exports what waits, for at most about `timeout_s`, and stops; what is left is dropped.

    A broker calls it while it still serves: its spans go through itself.
    """
    global _pipeline
    pipeline, _pipeline = _pipeline, None
    if pipeline is not None:
        pipeline.shutdown(timeout_s)


def exported() -> int:
    """Spans that this process has handed over, for all that `configure` set up."""
    return _exported + (_last.exported if _last is not None else 0)


def dropped() -> Mapping[str, int]:
    """Spans that this process has lost, by reason.

    `queue_full`: too many waited.  `export_failed`: nobody took them, or nobody knows.
    `shutdown`: they were still on their way at the end.  What a sampler refused is no loss.
    """
    last = _last.dropped_by_reason if _last is not None else {}
    return {reason: _dropped[reason] + last.get(reason, 0) for reason in REASONS}


def _put_by() -> None:
    """Its spans are counted for good: what ends later is its successor's."""
    global _last, _exported
    if _last is not None:
        _exported += _last.exported
        _dropped.update(_last.dropped_by_reason)
        _last = None
