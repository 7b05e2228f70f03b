"""Fixtures of the tests of a supervisor."""

import pytest

from tests.service.embedded.supervised import Events


@pytest.fixture
def events() -> Events:
    return Events()
