"""A server process, from its command line to its exit status."""

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from duemq import telemetry
from duemq.errors import DuemqError
from duemq.transport.tuning import new_event_loop, tune_process
from duemq_server.serving import settings as rpc_settings
from duemq_server.serving.logging import configure
from duemq_server.serving.settings import MemberSettings, ProcessSettings

log = logging.getLogger(__name__)

OPEN_FILES = 65_536
SIGNALS = (signal.SIGTERM, signal.SIGINT)

S = TypeVar("S", bound=ProcessSettings)


def main(
    service: str,
    kind: type[S],
    serve: Callable[[S, asyncio.Event], Awaitable[None]],
    argv: Sequence[str] | None = None,
    *,
    failures: tuple[type[Exception], ...] = (),
) -> int:
    """Runs `serve` until it returns; SIGTERM and SIGINT set the event that it gets.

    Returns the exit status: 0, or 1 after a DuemqError, an OSError or one of `failures`, which is
    logged.  Wrong settings end the process with status 2.  After BeginAnew the same process runs
    its program from the start.
    """
    settings = rpc_settings.load(kind, argv)
    name = f"{service} {settings.name}" if isinstance(settings, MemberSettings) else service
    configure(settings.log_level, settings.log_format, name)
    log.info("%s", settings)
    tune_process()
    _allow_open_files()
    expected: tuple[type[Exception], ...] = (DuemqError, OSError, *failures)
    stop = asyncio.Event()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_with_signals(partial(serve, settings), stop))
    except BeginAnew as reason:
        if stop.is_set():  # perhaps while the loop was closed: there is nothing to begin any more
            return 0
        log.warning("beginning anew: %s", reason)
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except expected as error:
        log.critical("%s: %s", type(error).__name__, error)
        return 1
    return 0


def _allow_open_files() -> None:
    """As many as it may: a shell's 1,024 are gone with as many clients.  As the systemd units."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _with_signals(
    serve: Callable[[asyncio.Event], Awaitable[None]], stop: asyncio.Event
) -> None:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        await serve(stop)
    finally:
        # uvloop's hears nothing while it stands still, as it does now and then until it is closed.
        for number in SIGNALS:
            signal.signal(number, lambda *_: stop.set())


class BeginAnew(Exception):
    """The process must begin anew: what it knows may not be so."""


class Process(Protocol):
    """What lives: a nameserver, a broker, a timer shard."""

    async def start(self) -> None:
        """Ready for clients when it returns."""

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.  Raises what ends it early."""

    async def stop(self) -> None:
        """Clean stop, also after `run` has raised."""


async def live(process: Process, stop: asyncio.Event) -> None:
    """A whole life.  Raises what start, run and stop raise."""
    await process.start()
    try:
        await process.run(stop)
    finally:
        await process.stop()


@contextmanager
def holding(directory: AbstractContextManager[object]) -> Iterator[None]:
    """Holds a data directory for as long as this process may write there.

    Who begins anew may until it executes itself, which ends its threads first, then the lock.
    """
    with ExitStack() as held:
        held.enter_context(directory)
        try:
            yield
        except BeginAnew:
            held.pop_all()
            raise


async def until(stop: asyncio.Event, *loops: asyncio.Future[Any]) -> None:
    """Returns when `stop` is set or one of `loops` ends; raises what that raised."""
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        done, _ = await asyncio.wait((stopped, *loops), return_when=asyncio.FIRST_COMPLETED)
        for end in done:
            end.result()
    finally:
        stopped.cancel()


def lasting(
    work: Coroutine[Any, Any, None], name: str, failed: Callable[[BaseException], None]
) -> asyncio.Task[None]:
    """A loop that nobody waits for: `failed` hears of what ends it, unless it is cancelled."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def end(*loops: asyncio.Task[Any]) -> None:
    """Cancels the loops of a process and returns when they have ended."""
    for task in loops:
        task.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


def trace(service: str, settings: MemberSettings) -> None:
    """Sends this process's spans where its settings say."""
    if settings.tracing != "off":
        telemetry.configure(
            service,
            settings.tracing,
            nameserver=",".join(settings.nameservers),
            instance=settings.name,
            tls=settings.tls,
        )


async def end_trace(settings: MemberSettings) -> None:
    """Sends the spans that wait and stops."""
    if settings.tracing != "off":
        await asyncio.to_thread(telemetry.shutdown)
