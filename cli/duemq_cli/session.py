"""The options that every command has: which cluster, for how long to wait, how to print."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

import duemq_cli
from duemq import telemetry
from duemq.errors import DuemqError, MissingBroker, PartialAnswer, TopicNotFound
from duemq.settings import (
    DEFAULT_NAMESERVER,
    NAMESERVER_VARIABLE,
    TLS_VARIABLE,
    TLS_VARIABLES,
    ClientSettings,
    ProducerSettings,
    Tls,
    default_tls,
)
from duemq_cli import contexts, streams
from duemq_cli.interrupts import Interruption
from duemq_cli.output import Output
from duemq_cli.times import Seconds

if TYPE_CHECKING:
    from duemq import Admin, ConsumerSettings

# People wait: what does not answer for so long is away.  Loading the program is a part of it, which
# can be long where the machine is busy.
CONNECT_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S_MIN = 1.5
# A timer shard that is started anew, or another replica of which leads, is there by then.
AWAY_TIMEOUT_S = 2.0

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass
class Session:
    """What the options say.  They may stand before or after the command's name."""

    # By option or environment.
    address: str | None = None
    nameserver_written: bool = False
    """The address stands in the command line: it is not one that other programs are to use, too."""
    json: bool = False
    timeout_s: float | None = None
    command: click.Command | None = None
    """The one that was called."""
    interruption: Interruption = field(default_factory=lambda: Interruption(lambda _: None))

    @cached_property
    def nameserver(self) -> str:
        """Option > environment > context > default.  Raises InvalidArgument for a bad context.

        An option that is written and empty names nothing: clients refuse it.
        """
        if self.address is not None:
            return self.address
        return contexts.load().nameserver or DEFAULT_NAMESERVER

    @cached_property
    def tls(self) -> Tls | None:
        """Option > environment > the context, if the address is its.  Raises InvalidArgument."""
        tls = default_tls()
        if tls is not None or self.address is not None:
            return tls
        return contexts.load().tls

    @property
    def client_settings(self) -> ClientSettings:
        """How to reach the cluster, and how long to wait for it."""
        if self.timeout_s is None:
            return ClientSettings(connect_timeout_s=self._connect_timeout_s, tls=self.tls)
        return ClientSettings(
            connect_timeout_s=self.timeout_s, request_timeout_s=self.timeout_s, tls=self.tls
        )

    def environment(self) -> dict[str, str]:
        """Of a process that reaches the cluster as this one does."""
        tls = self.tls
        if tls is None:
            return dict(os.environ)
        files = {variable: getattr(tls, name) for name, variable in TLS_VARIABLES.items()}
        return {**os.environ, TLS_VARIABLE: "1", **files}

    @cached_property
    def _connect_timeout_s(self) -> float:
        began_s = duemq_cli.began_s
        passed_s = 0.0 if began_s is None else time.monotonic() - began_s
        return round(max(CONNECT_TIMEOUT_S - passed_s, CONNECT_TIMEOUT_S_MIN), 1)

    def admin(self) -> Admin:
        """An admin client.  Raises Unavailable if no nameserver answers."""
        from duemq import Admin  # loaded by those who need it: commands start fast

        settings = self.client_settings
        if self.timeout_s is None:
            settings = dataclasses.replace(settings, away_timeout_s=AWAY_TIMEOUT_S)
        return Admin(self.nameserver, settings=settings)

    def producer_settings(self) -> ProducerSettings:
        """Of a producer."""
        if self.timeout_s is None:
            return ProducerSettings(client=self.client_settings)
        return ProducerSettings(client=self.client_settings, send_timeout_s=self.timeout_s)

    def consumer_settings(self) -> ConsumerSettings:
        """Of a consumer."""
        from duemq import ConsumerSettings

        if self.timeout_s is None:
            return ConsumerSettings(client=self.client_settings)
        return ConsumerSettings(client=self.client_settings, start_timeout_s=self.timeout_s)

    def missing(self, topic: str) -> tuple[MissingBroker, ...]:
        """Brokers that may have messages of the topic and do not answer.

        Raises TopicNotFound if all are there and none has it.
        """
        try:
            with self.admin() as admin:
                return admin.describe_topic(topic).missing
        except PartialAnswer as error:
            return error.missing
        except TopicNotFound:
            raise
        except DuemqError as error:
            return (MissingBroker("the brokers", str(error)),)

    def changes(self) -> None:
        """From here on the command changes something: who interrupts it is told."""
        self.interruption.left = lambda: "what was asked for may have been done: look first"

    @property
    def output(self) -> Output:
        """Where results and errors go."""
        return Output(self.json)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Traces what the command does, when DUEMQ_TRACING says so."""
        exporter = os.environ.get("DUEMQ_TRACING", "off")
        if exporter == "off":
            yield
            return
        telemetry.configure("duemq-cli", exporter, nameserver=self.nameserver, tls=self.tls)
        try:
            yield
        finally:
            telemetry.shutdown()


def _set_nameserver(context: click.Context, option: click.Parameter, value: str | None) -> None:
    session = context.ensure_object(Session)
    written = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    # The root and its command both look at the environment: it comes after what is written.
    if value is not None and (written or session.address is None):
        session.address = value
        session.nameserver_written = written


def _set_json(context: click.Context, _: click.Parameter, value: bool) -> None:
    session = context.ensure_object(Session)
    session.command = context.command
    session.json = session.json or value


def _set_timeout(context: click.Context, _: click.Parameter, value: float | None) -> None:
    session = context.ensure_object(Session)
    if value is not None:
        session.timeout_s = value


def session_options(command: F) -> F:
    """Adds `--nameserver`, `--timeout` and `--json` to a command."""
    nameserver = click.option(
        "--nameserver",
        metavar="HOST:PORT[,…]",
        envvar=NAMESERVER_VARIABLE,
        show_envvar=True,
        expose_value=False,
        is_eager=True,
        callback=_set_nameserver,
        help=f"Where the nameservers are.  [default: the context's, or {DEFAULT_NAMESERVER}]",
    )
    timeout = click.option(
        "--timeout",
        type=Seconds(0.1, 86_400),
        metavar="S",
        expose_value=False,
        is_eager=True,
        callback=_set_timeout,
        help="How long to wait for the cluster.  [default: 3 to connect, 10 for an answer]",
    )
    json = click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_json,
        help="Print JSON Lines, one object a line, errors too.",
    )
    return nameserver(timeout(json(command)))


def _set_tls(_: click.Context, option: click.Parameter, value: str | None) -> None:
    """What is written takes the place of what the environment says, for clients and children."""
    if value is not None:
        os.environ[TLS_VARIABLES[str(option.name).removeprefix("tls_")]] = value


def tls_options(command: F) -> F:
    """Adds `--tls-ca`, `--tls-cert` and `--tls-key`."""
    meanings = {
        "ca": "The cluster speaks TLS: authorities that are trusted.",
        "cert": "The certificate that is shown to the cluster.",
        "key": "Its key.",
    }
    for name, meaning in reversed(meanings.items()):
        command = click.option(
            f"--tls-{name}",
            metavar="FILE",
            expose_value=False,
            is_eager=True,
            callback=_set_tls,
            help=f"{meaning}  [env var: {TLS_VARIABLES[name]}]",
        )(command)
    return command


def known(answer: Callable[[], T]) -> tuple[T, tuple[MissingBroker, ...]]:
    """An answer, and the brokers whose part is not in it.  Raises DuemqErrors."""
    try:
        return answer(), ()
    except PartialAnswer as error:
        if error.partial is None:
            raise
        return cast(T, error.partial), error.missing


def yes_option(command: F) -> F:
    """Adds `--yes` to a command that takes something away."""
    return click.option(
        "--yes", is_flag=True, help="Do not ask.  Nobody is asked without a terminal."
    )(command)


def if_not_exists_option(command: F) -> F:
    """Adds `--if-not-exists` to a command that makes something."""
    return click.option(
        "--if-not-exists", is_flag=True, help="Do nothing, and succeed, if it is there."
    )(command)


def confirmed(
    session: Session, question: str, *, yes: bool, missing: Sequence[MissingBroker] = ()
) -> bool:
    """Asks, where there is a terminal to ask at; True without one, with `--yes` or `--json`.

    `missing`: whose part the question lacks; they may be back when it is answered.
    """
    if yes or session.json:
        return True
    session.output.warn_missing(missing)
    if not streams.can_be_asked():
        return True
    if click.confirm(question, err=True):
        return True
    session.output.note("nothing was done")
    return False


pass_session = click.make_pass_decorator(Session, ensure=True)
