"""Threads that nobody leaves behind: what they do to a disk is done when their caller ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(do: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Has a thread do something; to its end, however often the caller is cancelled."""
    work = asyncio.create_task(asyncio.to_thread(do, *args, **named))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((work,))
        raise
