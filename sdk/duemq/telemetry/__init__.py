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
from typing import TYPE_CHECKING

from duemq.errors import Unavailable
from duemq.protocol import checks
from duemq.settings import default_nameserver

if TYPE_CHECKING:
    from duemq.telemetry.pipeline import Pipeline

__all__ = ["EXPORTERS", "configure", "configure_from_env", "shutdown"]

EXPORTERS = ("off", "duemq", "otlp")

SHUTDOWN_TIMEOUT_S = 5.0

_PACKAGES = {"duemq": "'duemq[telemetry]'", "otlp": "'duemq[otlp]'"}

_pipeline: Pipeline | None = None


def configure(
    service: str,
    exporter: str = "duemq",
    *,
    nameserver: str | None = None,
    instance: str = "",
) -> Pipeline | None:
    """Turns tracing on for this process and answers its pipeline; None for `off`.

    `nameserver`: None means DUEMQ_NAMESERVER's, as for clients.  `service` and `instance` become
    service.name (unless OTEL_SERVICE_NAME says otherwise) and service.instance.id.  If the process
    has an opentelemetry-sdk tracer provider already, the exporter joins it.  Sampling:
    OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG; queue and rhythm: OTEL_BSP_*; the collector:
    OTEL_EXPORTER_OTLP_*.  A second call replaces the first's pipeline.  At the interpreter's exit
    `shutdown` is called.

    Raises InvalidArgument for an unknown exporter and for wrong OTEL_EXPORTER_OTLP_* variables,
    Unavailable where a package is missing.
    """
    global _pipeline
    checks.one_of("tracing", exporter, EXPORTERS)
    shutdown()
    if exporter == "off":
        return None
    try:
        from duemq.telemetry.pipeline import start

        _pipeline = start(
            service, exporter, nameserver=nameserver or default_nameserver(), instance=instance
        )
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"tracing {exporter} needs the module {error.name}: pip install {_PACKAGES[exporter]}",
            field="tracing",
            value=exporter,
            retryable=False,
        ) from error
    # Registered last, called first: OpenTelemetry's own end at exit may wait for 30 s.
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    return _pipeline


def configure_from_env(service: str, *, instance: str = "") -> Pipeline | None:
    """As `configure`, with DUEMQ_TRACING (default off)."""
    return configure(
        service,
        os.environ.get("DUEMQ_TRACING", "off"),
        instance=instance,
    )


def shutdown(timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
    """Exports what waits, for at most about `timeout_s`, and stops; what is left is dropped.

    A broker calls it while it still serves: its spans go through itself.
    """
    global _pipeline
    pipeline, _pipeline = _pipeline, None
    if pipeline is not None:
        pipeline.shutdown(timeout_s)
