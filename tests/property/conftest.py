"""What takes long only where it fails."""

import pytest

SHRINK_S = 600
"""Hypothesis looks for a small example for up to 300 s; cut short, a failure says nothing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.timeout(SHRINK_S), append=False)
