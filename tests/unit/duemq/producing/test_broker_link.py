import pytest

from duemq.errors import Unavailable
from duemq.producing.broker_link import _connected
from duemq.transport import channel


async def test_a_closed_channel_is_no_connection() -> None:
    """Another address of the broker came meanwhile: gRPC's own error would end the producer."""
    closed = channel.connect("192.0.2.1:1")  # nobody's: it neither connects nor is refused at once
    await closed.close()
    with pytest.raises(Unavailable, match="was closed"):
        await _connected(closed, "192.0.2.1:1")
