"""Both ends of a stream live and die together."""

import pytest

from duemq.errors import FencedMember, Timeout
from duemq.transport.streams import first_of


async def test_of_parts_that_end_at_once_the_first_one_is_told():
    """What a peer has said counts more than that it is silent by now."""

    async def fail(error: Exception) -> None:
        raise error

    silent = [fail(Timeout(f"{number}")) for number in range(20)]
    with pytest.raises(FencedMember):
        await first_of(fail(FencedMember("replaced")), *silent)
