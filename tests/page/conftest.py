"""`make page-test` fetches a browser and runs these; `make test` needs no network and does not."""

import os
from pathlib import Path

import pytest

from tests.page.browser import Browser
from tests.page.content import page

EXECUTABLE = os.environ.get("DUEMQ_BROWSER")

if EXECUTABLE is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def browser():
    started = Browser(EXECUTABLE)
    yield started
    started.close()


@pytest.fixture(scope="session")
def html(tmp_path_factory):
    """The page of two topics: one with 16 groups, one with due times and three groups."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page())
    return path


@pytest.fixture(scope="session")
def pictures():
    """Where pictures of the page go, for people; None: nowhere (DUEMQ_PICTURES)."""
    folder = os.environ.get("DUEMQ_PICTURES")
    return None if folder is None else Path(folder)
