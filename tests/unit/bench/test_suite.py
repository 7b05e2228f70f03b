"""What a benchmark is refused before its cluster starts."""

import pytest

from duemq.errors import InvalidArgument
from duemq_server.bench import suite


def test_replicas_in_sync_are_no_more_than_there_are() -> None:
    with pytest.raises(InvalidArgument, match="min_insync"):
        suite.run("catch-up", {"min_insync": 2}, suite.BenchPlace(replicas=1))
