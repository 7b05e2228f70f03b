"""What every way to call the application has in common."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from duemq.consumer.delivery.workers import Callback, is_async
from duemq.message import Message
from duemq.outcomes import errors_of
from duemq.tracing import meters, processing, spans

Watch = Callable[[Sequence[Message]], AbstractContextManager[None]]
_NOT_WATCHED = nullcontext()
# What calls of `async def` functions and of those with `yield` return: nothing of them ran yet.
_NOT_BEGUN = CoroutineType, GeneratorType, AsyncGeneratorType


def check_ran(answer: object) -> None:
    """Of what a callback returned.

    Raises TypeError for a coroutine or a generator: nothing of it ran, so nothing is done.
    """
    if isinstance(answer, _NOT_BEGUN):
        kind = type(answer).__name__
        if isinstance(answer, CoroutineType):
            answer.close()  # else Python warns that it was never awaited, which this says better
        raise TypeError(
            f"the callback returned a {kind}, of which nothing ran: give the coroutine function"
            " itself, or await what it returns"
        )


class Calling:
    """One call of the callback, traced and measured."""

    def __init__(self, callback: Callback, *, batch: bool, group: str, client_id: str) -> None:
        """`batch`: it gets lists."""
        # It may sort or empty a list: it gets a copy.
        given = (lambda messages: callback(list(messages))) if batch else callback
        # In a thread what it sets in its context is not for the next.
        self.callback = given if is_async(callback) else lambda x: copy_context().run(given, x)
        self.batch = batch
        self._group = group
        self._client_id = client_id

    async def awaited(
        self, messages: Sequence[Message], argument: Any, span: Watch | None
    ) -> BaseException | None:
        """Answers what the callback raised, an exit too.  `span`: as of `watch`, or `self.span`.

        Raises only what is not of the callback's making, but ends the loop.
        """
        try:
            with _NOT_WATCHED if span is None else span(messages):
                check_ran(await self.callback(argument))
        except BaseException as error:
            if _ends_the_loop(error):
                raise
            return error
        return None

    def span(self, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """Traces and measures the callback for these messages."""
        if not meters.enabled() or not messages:
            return self._traced(messages)
        return self._measured(messages)

    def watch(self, messages: Sequence[Message] | None = None) -> Watch | None:
        """As `span`, for each of many callbacks, which have a message; None: nobody wants it.

        `messages`: all of them, if one pull brought them.
        """
        if meters.enabled():
            return self._measured
        wanted = spans.enabled() if messages is None else processing.wanted(messages)
        return self._traced if wanted else None

    def _traced(self, messages: Sequence[Message]) -> AbstractContextManager[None]:
        return self._span(messages) if processing.wanted(messages) else _NOT_WATCHED

    @contextmanager
    def _measured(self, messages: Sequence[Message]) -> Iterator[None]:
        with meters.processing(messages[0].topic, self._group), self._span(messages):
            yield

    def _span(self, messages: Sequence[Message]) -> AbstractContextManager[None]:
        return processing.process(
            messages, group=self._group, client_id=self._client_id, blame=errors_of
        )


def _ends_the_loop(error: BaseException) -> bool:
    """It is closed without one, after its own has ended; or Ctrl-C ends the program."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    return isinstance(error, GeneratorExit) and not asyncio._get_running_loop()
