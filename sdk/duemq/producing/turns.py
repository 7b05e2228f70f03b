"""Waiting in the order of the calls."""

import asyncio
from typing import Literal


class Turns(asyncio.Lock):
    """While anybody is `waiting`, or has it, who comes takes it, too."""

    waiting = 0

    async def acquire(self) -> Literal[True]:
        """As Lock."""
        self.waiting += 1
        try:
            return await super().acquire()
        except BaseException:
            self.waiting -= 1
            raise

    def release(self) -> None:
        """As Lock."""
        super().release()
        self.waiting -= 1
