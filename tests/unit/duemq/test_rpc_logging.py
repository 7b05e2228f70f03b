import json
import logging

import pytest

pytest.importorskip("pythonjsonlogger")
from duemq.rpc.logging import configure


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
