"""Both ends of a stream live and die together."""

import asyncio

import pytest

from duemq.errors import FencedMember, Timeout
from duemq.transport.streams import first_of


async def test_of_parts_that_end_at_once_the_first_one_is_told():
    """What a peer has said counts more than that it is silent by now."""
    resumed = asyncio.Event()

    async def fail(error: Exception) -> None:
        await resumed.wait()
        raise error

    silent = [fail(Timeout(f"{number}")) for number in range(20)]
    parts = asyncio.create_task(first_of(fail(FencedMember("replaced")), *silent))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    resumed.set()
    with pytest.raises(FencedMember):
        await parts
