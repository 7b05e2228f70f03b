"""The root of the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from duemq.errors import DuemqError, InvalidArgument
from duemq_cli import interrupts, plugins, streams
from duemq_cli.exits import Exit, exit_of
from duemq_cli.interrupts import Interruption
from duemq_cli.output import Output, in_words_of
from duemq_cli.session import Session, session_options, tls_options

# Command → the module that holds it; loaded when it is asked for, so that each starts fast.
COMMANDS = {
    "send": "duemq_cli.commands.send",
    "consume": "duemq_cli.commands.consume",
    "tail": "duemq_cli.commands.tail",
    "topic": "duemq_cli.commands.topic",
    "group": "duemq_cli.commands.group",
    "message": "duemq_cli.commands.message",
    "dlq": "duemq_cli.commands.dlq",
    "timer": "duemq_cli.commands.timer",
    "schedule": "duemq_cli.commands.schedule",
    "cluster": "duemq_cli.commands.cluster",
    "context": "duemq_cli.commands.context",
}
TEXT_SHOWN = 80
"""Characters of a text that is none."""

# They have processes of their own to end.
OWNERS = {"bench", "demo"}


class Root(click.Group):
    """Loads commands lazily and turns every error into one line and an exit code."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Our commands in the order of a first session, then those of other distributions."""
        return [*COMMANDS, *(name for name in plugins.names() if name not in COMMANDS)]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The command of that name, from its module or from the distribution that brings it."""
        if name not in COMMANDS:
            return plugins.load(name)
        command = getattr(importlib.import_module(COMMANDS[name]), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is to run."""
        name, command, rest = super().resolve_command(context, args)
        if name in OWNERS:
            interrupts.unbound()
        return name, command, rest

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Runs a command line and ends the process with its exit code."""
        arguments = list(sys.argv[1:] if args is None else args)
        output = Output("--json" in arguments)
        interruption = Interruption(output.interrupted)
        extra |= {"standalone_mode": False, "obj": Session(interruption=interruption)}
        with interrupts.bounded(interruption):
            sys.exit(self._run(arguments, output, interruption, *rest, **extra))

    def _run(
        self,
        arguments: list[str],
        output: Output,
        interruption: Interruption,
        *rest: Any,
        **extra: Any,
    ) -> int:
        say: Callable[[], None] = _nothing
        try:
            code = super().main(arguments, *rest, **extra)
        except DuemqError as error:
            named = in_words_of(extra["obj"].command, error)
            code, say = exit_of(error), partial(output.error, named)
        except click.ClickException as error:
            code, say = error.exit_code, partial(_usage_error, output, error)
        except UnicodeEncodeError as error:  # an argument of other bytes became part of a request
            code, say = Exit.USAGE, partial(output.error, _no_text(error))
        except (click.Abort, KeyboardInterrupt):
            code, say = Exit.INTERRUPTED, interruption.tell
        except OSError as error:
            code, say = Exit.FAILED, partial(output.error, error)
            if isinstance(error.__context__, KeyboardInterrupt):  # click ends the line that has ^C
                code, say = Exit.INTERRUPTED, interruption.tell
            elif isinstance(error, BrokenPipeError):  # who read our output has seen enough
                say = partial(streams.give_up, sys.stdout)
        _tell(output, say)
        return int(code or 0)


def _no_text(error: UnicodeEncodeError) -> InvalidArgument:
    text = ascii(error.object[:TEXT_SHOWN])
    return InvalidArgument(f"{text} is not UTF-8 text", field="argument", value=text)


def _nothing() -> None:
    pass


def _tell(output: Output, say: Callable[[], None]) -> None:
    """Where nobody can be told the exit code says what it can."""
    try:
        say()
    except OSError:
        streams.give_up(sys.stdout if output.as_json else sys.stderr)
        if output.as_json:
            output.as_json = False  # people can be told, perhaps
            _tell(output, say)


def _usage_error(output: Output, error: click.ClickException) -> None:
    if output.as_json:
        text = error.format_message()
        output.error(InvalidArgument(text) if error.exit_code == Exit.USAGE else text)
    else:
        error.show()


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done · 1 something failed · 2 wrong arguments · 3 the cluster cannot be "
    "reached · 4 no such topic, queue, group or schedule · 5 a broker is away, the answer is "
    "partial · 130 interrupted.",
)
@click.version_option(package_name="duemq-cli")
@session_options
@tls_options
def cli() -> None:
    """DueMQ: a message queue in which every message may carry a due time.

    \b
    A first session:
      duemq up --data ./data                        in one terminal: a whole cluster
      duemq send greetings "hello"                  in another
      duemq send greetings "later" --delay 5s
      duemq consume greetings --group me --from earliest --idle-timeout 10
    """
