"""What `duemq up --permissions` tells its processes, or refuses before it starts any."""

from pathlib import Path

import pytest

from duemq.errors import InvalidArgument
from duemq_server.local_cluster.command import _permitted


def test_all_processes_are_told_the_file(tmp_path: Path) -> None:
    path = tmp_path / "permissions.toml"
    path.write_text('[[allow]]\nnames = ["cluster"]\nservice = true\n')
    assert _permitted(str(path), verify_clients=True) == ["--permissions", str(path)]
    assert _permitted(None, verify_clients=False) == []
    with pytest.raises(InvalidArgument, match="given with --permissions"):
        _permitted(str(path), verify_clients=False)
    path.write_text("[[allow")
    with pytest.raises(InvalidArgument, match="permissions: "):
        _permitted(str(path), verify_clients=True)
