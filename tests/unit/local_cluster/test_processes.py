"""What an embedded cluster says of processes that come and go meanwhile."""

from pathlib import Path
from unittest.mock import Mock, PropertyMock

from duemq_server.local_cluster import EmbeddedCluster


def test_a_member_may_end_while_processes_are_listed(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(tmp_path)
    ending = Mock()
    ending.name = "broker-0"
    type(ending).process = PropertyMock(side_effect=[Mock(pid=7), None])
    cluster._members["broker-0"] = ending
    assert cluster.processes == {"broker-0": 7}
