"""Both ends of a bidirectional stream: reading and writing live and die together."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc.aio

from duemq.errors import Unavailable
from duemq.transport import status

Request = TypeVar("Request")
Answer = TypeVar("Answer")


async def first_of(*parts: Coroutine[Any, Any, Any]) -> None:
    """Runs all until one ends, cancels the others, and ends like that one.

    Of several that end at once, as after a SIGSTOP, the first in line.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read(stream: grpc.aio.StreamStreamCall[Request, Answer], peer: str) -> Answer:
    """The next answer.  Raises a DuemqError; Unavailable at the end."""
    answer = await status.answer(stream.read(), peer)
    if answer is grpc.aio.EOF:
        raise Unavailable(f"{peer} ended the stream")
    return answer  # type: ignore[return-value]


async def write(
    stream: grpc.aio.StreamStreamCall[Request, Answer], request: Request, peer: str
) -> None:
    """Sends a request; one write at a time.  Raises a DuemqError."""
    try:
        await status.answer(stream.write(request), peer)
    except asyncio.InvalidStateError as error:
        raise Unavailable(f"{peer} ended the stream") from error
