from __future__ import annotations

import pytest

from duemq.errors import Corrupt
from duemq_server.storage.replicas import epoch
from tests.property.timer_world import START_MS, World


@pytest.mark.parametrize("kind", [epoch.KIND, 40])
def test_a_start_passes_over_what_replication_wrote(kind: int) -> None:
    world = World()
    world.broker.accept([START_MS], 10, "keyed")
    world.ingest(1)
    world.directory.log.append(kind, [epoch.encode(1, bytes(16), START_MS)])
    world.sync()
    world.kill()
    world.drain()
    assert set(world.broker.delivered) == {0}


def test_a_start_refuses_an_entry_that_it_does_not_know() -> None:
    world = World()
    world.directory.log.append(31, [b""])
    world.sync()
    with pytest.raises(Corrupt, match="unknown kind 31"):
        world.kill()
