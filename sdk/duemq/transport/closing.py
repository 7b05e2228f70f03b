"""What `with` does: what was opened is closed at the end."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """For `with`: closes at the end."""

    @abstractmethod
    def close(self) -> None:
        """Closes it.  Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()


class AsyncClient(ABC):
    """What asyncio clients have in common.  For `async with`: starts, and closes at the end."""

    @abstractmethod
    async def start(self) -> None:
        """Connects."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the connections.  Idempotent."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await self.close()
