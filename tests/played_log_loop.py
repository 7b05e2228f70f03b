"""In place of the log's loop of a shard that is played."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


class PlayedLogLoop:
    """Keeps what ended the shard's other loops."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)


LOG_LOOP = PlayedLogLoop()


@pytest.fixture(autouse=True)
def no_loop_fails() -> Iterator[None]:
    """Nor does an assertion inside of one: nobody waits for it."""
    LOG_LOOP.failures.clear()
    yield
    assert LOG_LOOP.failures == []
