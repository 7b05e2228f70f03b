"""When a member has begun: what is sent from then on it is not to leave out.

With "latest" a queue without an offset begins at its end as its broker is first asked.  Who starts
a consumer and then sends must not be quicker than that.
"""

import asyncio
from collections.abc import Iterable


class Beginning:
    """Waits for the first try to take over what the first assignment names."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: brokers that do not answer are waited for no longer."""
        self.over = asyncio.Event()
        """The group has answered, and the first queues are taken over, or not to be had at once."""
        self._limit_s = limit_s
        self._asked: set[str] | None = None

    def assigned(self, brokers: Iterable[str]) -> None:
        """These are asked for queues; only those of the first assignment count."""
        if self._asked is None:
            self._asked = set(brokers)
            asyncio.get_running_loop().call_later(self._limit_s, self.over.set)
            self.tried("")

    def tried(self, broker: str) -> None:
        """It has answered, or could not, or nothing of it is wanted any more."""
        if self._asked is not None:
            self._asked.discard(broker)
            if not self._asked:
                self.over.set()
