"""Structured logs on stderr, as text for people or a JSON object a line for machines."""

import logging
import sys
import time

from pythonjsonlogger.json import JsonFormatter

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
JSON = "%(asctime)s %(levelname)s %(name)s %(message)s"


def configure(level: str = "INFO", form: str = "text", process: str = "") -> None:
    """Sends the log of the whole process to stderr.  `process` is put on every JSON line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json(process) if form == "json" else _text())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    # It logs each probe that a client broke off.
    logging.getLogger("grpc").setLevel(logging.WARNING)


def _text() -> logging.Formatter:
    formatter = logging.Formatter(TEXT)
    formatter.converter = time.gmtime
    formatter.default_time_format = "%Y-%m-%dT%H:%M:%S"
    formatter.default_msec_format = "%s.%03dZ"
    return formatter


def _json(process: str) -> logging.Formatter:
    formatter = JsonFormatter(
        JSON,
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        static_fields={"process": process} if process else {},
    )
    formatter.converter = time.gmtime
    formatter.default_time_format = "%Y-%m-%dT%H:%M:%S"
    formatter.default_msec_format = "%s.%03dZ"
    return formatter
