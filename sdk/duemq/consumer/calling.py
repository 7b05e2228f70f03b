"""What every way to call the application has in common."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from duemq import tracing
from duemq.consumer.outcomes import errors_of
from duemq.consumer.workers import Callback
from duemq.message import Message


class Calling:
    """One call of the callback, traced."""

    def __init__(self, callback: Callback, *, batch: bool, group: str, client_id: str) -> None:
        """`batch`: it gets lists."""
        self.callback = callback
        self.batch = batch
        self._group = group
        self._client_id = client_id

    async def awaited(self, messages: Sequence[Message], argument: Any) -> BaseException | None:
        """Answers what the callback raised.  Raises CancelledError if this task is cancelled."""
        try:
            with self.span(messages):
                await self.callback(argument)
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            return error
        except Exception as error:
            return error
        return None

    def span(self, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """Traces the callback for these messages."""
        return tracing.process(
            messages, group=self._group, client_id=self._client_id, blame=errors_of
        )
