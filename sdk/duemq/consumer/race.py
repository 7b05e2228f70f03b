"""Several coroutines that live and die together."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(*parts: Coroutine[Any, Any, None] | Coroutine[Any, Any, bool]) -> None:
    """Runs all until one ends, cancels the others, and ends like that one."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
