"""One Spark session for all tests here: starting one costs seconds."""

import pytest

from trace_analytics import session


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    started = session.start("tests", tmp_path_factory.mktemp("spark"), quick=True)
    yield started
    started.stop()
