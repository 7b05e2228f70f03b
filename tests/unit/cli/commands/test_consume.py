"""What `duemq consume` prints and when it ends."""

import logging
import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest
from click.testing import CliRunner

from duemq_cli.app import cli
from duemq_cli.commands.consume import _closing, _Printer
from duemq_cli.exits import Exit
from duemq_cli.output import Output


@pytest.fixture(autouse=True)
def loggers_as_they_were():
    """A command that ends silences what its process logs."""
    logger = logging.getLogger("duemq.consumer")
    level = logger.level
    yield
    logger.setLevel(level)


def ended_by_a_signal_at_line(number: int) -> bool:
    """Whether `wait` ends after a signal came before its line of that number, counted as they run.

    None of ours, nor of the library below it, may hold a lock then that the handler needs.
    """
    printer = _Printer(Output(as_json=True), count=None)
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines == number:
            sys.settrace(None)
            printer.interrupt(signal.SIGTERM, frame)
            return None
        return trace

    def wait() -> None:
        sys.settrace(trace)
        printer.wait(idle_timeout=0.01)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


@pytest.mark.parametrize("line", range(1, 40))
def test_a_signal_ends_it_wherever_it_comes(line: int) -> None:
    assert ended_by_a_signal_at_line(line)


@pytest.mark.parametrize(("printed", "said"), [(2, "committed, group g left"), (0, "not told")])
def test_ctrl_c_in_a_start_that_brought_messages_already_says_that_they_are_committed(
    printed: int, said: str
) -> None:
    """A consumer that is interrupted as it starts closes: what it delivered is committed."""
    printer = _Printer(Output(as_json=False), count=None)

    class Starting:
        def start(self) -> None:
            printer.printed = printed
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), _closing(Starting(), printer):
        pass
    assert said in printer.left("g")


def test_a_wrong_name_of_a_member_is_told_as_it_was_typed() -> None:
    command = ["--nameserver", "ns:1", "consume", "t", "--group", "g", "--member", "a b"]
    told = CliRunner().invoke(cli, command)
    assert told.exit_code == Exit.USAGE
    assert "--member: 'a b' is not allowed" in told.stderr
