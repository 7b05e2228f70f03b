"""A test's own server leaves no connection behind, whenever its last one came."""

import asyncio
import gc
import socket
import warnings

import pytest

from tests.listening import listening


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read(1)


@pytest.mark.parametrize("turns", range(6))
async def test_what_comes_at_its_end_is_closed(turns: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with listening(silent) as address:
            host, port = address.split(":")
            client = socket.create_connection((host, int(port)))
            for _ in range(turns):
                await asyncio.sleep(0)
        client.close()
        gc.collect()
    assert not [str(each.message) for each in caught if each.category is ResourceWarning]
