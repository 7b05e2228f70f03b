"""What every way to call the application has in common."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from duemq.consumer.delivery.workers import Callback
from duemq.message import Message
from duemq.outcomes import errors_of
from duemq.tracing import spans

_NOT_TRACED = nullcontext()


class Calling:
    """One call of the callback, traced."""

    def __init__(self, callback: Callback, *, batch: bool, group: str, client_id: str) -> None:
        """`batch`: it gets lists."""
        self.callback = callback
        self.batch = batch
        self._group = group
        self._client_id = client_id

    async def awaited(self, messages: Sequence[Message], argument: Any) -> BaseException | None:
        """Answers what the callback raised, an exit too.

        Raises only what is not of the callback's making, but is to end this task.
        """
        try:
            with self.span(messages):
                await self.callback(argument)
        except BaseException as error:
            if _ends_the_task(error):
                raise
            return error
        return None

    def span(self, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """Traces the callback for these messages."""
        if not spans.wanted(messages):
            return _NOT_TRACED
        return spans.process(
            messages, group=self._group, client_id=self._client_id, blame=errors_of
        )


def _ends_the_task(error: BaseException) -> bool:
    """It was cancelled, or closed after its loop; or Ctrl-C ends the program."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs here
            return True
        return task is not None and task.cancelling() > 0
    return False
