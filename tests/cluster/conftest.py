"""Fixtures of the cluster tests."""

import pytest

from tests.cluster.harness import cluster, two_nameservers  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts real processes."""
    for item in items:
        if "tests/cluster/" in item.path.as_posix():
            item.add_marker(pytest.mark.cluster)
