import json
import logging

import pytest

pytest.importorskip("pythonjsonlogger")
from duemq_server.serving.logging import KINDS_MAX, OnceAMinute, configure


@pytest.fixture
def root():
    """The root logger, put back as it was."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_json_lines_say_when_who_what(root, capsys):
    configure("INFO", "json", "broker b-0")
    logging.getLogger("x").warning("%d of %d", 1, 2, extra={"topic": "t"})
    logging.getLogger("x").debug("not this")
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "WARNING",
        "logger": "x",
        "message": "1 of 2",
        "process": "broker b-0",
        "topic": "t",
    }


def test_json_keeps_a_traceback_on_the_line(root, capsys):
    configure("INFO", "json")
    try:
        raise ValueError("here")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: here" in json.loads(line)["exc_info"]


def test_text_is_for_people(root, capsys):
    configure("DEBUG", "text")
    logging.getLogger("x").debug("hello")
    assert capsys.readouterr().err.endswith("Z DEBUG   x: hello\n")


def test_a_library_writes_one_line_of_a_kind_a_minute() -> None:
    once = OnceAMinute("grpc")

    def passes(name: str, text: str, at_s: float) -> bool:
        record = logging.LogRecord(name, logging.ERROR, "", 0, text, (at_s,), None)
        record.created = 1_000_000 + at_s
        return once.filter(record)

    assert passes("grpc.aio", "failed %s", 0)
    assert not passes("grpc.aio", "failed %s", 59)
    assert passes("grpc.aio", "failed otherwise", 59)
    assert passes("grpc.aio", "failed %s", 60)
    assert passes("grpc.aio", "failed %s", -3600)  # the clock was set back
    assert not passes("grpc.aio", "failed %s", -3541)
    assert all(passes("duemq.transport", "failed %s", at_s) for at_s in range(3))
    for number in range(2 * KINDS_MAX):
        assert passes("grpc.aio", f"kind {number}", 61)
    assert len(once._last_s) <= KINDS_MAX
