"""One Spark session for all tests here: starting one costs seconds, on a busy machine many."""

import pytest

from duemq_analytics import session

TIMEOUT_S = 300


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/spark/" in item.path.as_posix():
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    started = session.start("tests", tmp_path_factory.mktemp("spark"), quick=True)
    yield started
    started.stop()
