"""What `with` does: what was opened is closed at the end."""

from typing import Self


class Closing:
    """For `with`: closes at the end."""

    def close(self) -> None:
        """Closes it.  Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()


class AsyncClient:
    """What asyncio clients have in common.  For `async with`: starts, and closes at the end."""

    async def start(self) -> None:
        """Connects."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the connections.  Idempotent."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await self.close()
