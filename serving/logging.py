"""Structured logs on stderr, as text for people or a JSON object a line for machines."""

import logging
import sys
import time

from pythonjsonlogger.json import JsonFormatter

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
JSON = "%(asctime)s %(levelname)s %(name)s %(message)s"


KINDS_MAX = 1_000


class OnceAMinute(logging.Filter):
    """Lets one line of a kind pass a minute, of a library that logs what any client can cause.

    A kind: a logger and a text before its arguments are put in.
    """

    def __init__(self, library: str) -> None:
        super().__init__()
        self._prefix = library
        self._last_s: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        if not record.name.startswith(self._prefix):
            return True
        kind = (record.name, str(record.msg)[:100])
        ago_s = record.created - self._last_s.get(kind, 0.0)
        if 0 <= ago_s < 60:  # less than 0: the clock was set back
            return False
        if len(self._last_s) >= KINDS_MAX:
            self._last_s.clear()
        self._last_s[kind] = record.created
        return True


def configure(level: str = "INFO", form: str = "text", process: str = "") -> None:
    """Sends the log of the whole process to stderr.  `process` is put on every JSON line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json(process) if form == "json" else _text())
    handler.addFilter(OnceAMinute("grpc"))
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
